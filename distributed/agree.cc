#include "distributed/agree.h"

#include <algorithm>

namespace sherd::dist {

namespace {
thread_local const char* current_call = nullptr;
}

CollectiveCall::CollectiveCall(const char* name) : before_(current_call) {
  if (!current_call) current_call = name;
}
CollectiveCall::~CollectiveCall() { current_call = before_; }

std::vector<int64_t> all_gather_number(const Group& group, int64_t mine,
                                       const CollectiveOptions& options) {
  const int w = size_of_group(group);
  if (w == 1) return {mine};
  const Tensor all = empty({w}, kInt64);
  std::vector<Tensor> places;
  for (int r = 0; r < w; ++r) places.push_back(all.as_strided_raw({1}, {1}, r));
  group->all_gather(places, tensor<int64_t>({mine}), options).wait();
  return {all.data<int64_t>(), all.data<int64_t>() + w};
}

std::vector<std::string> all_gather_text(const Group& group, const std::string& mine,
                                         const CollectiveOptions& options) {
  if (size_of_group(group) == 1) return {mine};
  std::vector<Tensor> texts;
  for (int64_t size : all_gather_number(group, int64_t(mine.size()), options))
    texts.push_back(empty({size}, kUInt8));
  Tensor text = empty({int64_t(mine.size())}, kUInt8);
  std::copy(mine.begin(), mine.end(), text.data<uint8_t>());
  group->all_gather(texts, text, options).wait();
  std::vector<std::string> all;
  for (auto& t : texts) all.emplace_back(t.numel() ? t.bytes() : "", size_t(t.numel()));
  return all;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return *e.what() ? e.what() : "an error without a text";
  } catch (...) {
    return "an exception that is no std::exception";
  }
  return "";
}

RankError join_errors(const Group& group, const RankError& mine) {
  if (size_of_group(group) == 1) return mine;
  const Tensor worst = tensor<int32_t>({mine.text.empty() ? 0 : mine.special ? 2 : 1});
  const std::string label =
      current_call ? concat(current_call, ", which all ranks must call") : "did any rank fail?";
  group->all_reduce(worst, ReduceOp::kMax, {.label = label}).wait();
  RankError all{.special = worst.item<int32_t>() == 2};
  if (worst.item<int32_t>() == 0) return all;
  const std::vector<std::string> texts = all_gather_text(group, mine.text);
  if (std::ranges::all_of(texts, [&](auto& t) { return t == texts[0]; })) {
    all.text = texts[0];
    return all;
  }
  for (size_t r = 0; r < texts.size(); ++r)
    if (!texts[r].empty())
      all.text += concat(all.text.empty() ? "" : "\n", "rank ", r, ": ", texts[r]);
  return all;
}

}  // namespace sherd::dist
