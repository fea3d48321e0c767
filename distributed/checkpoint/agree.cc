#include "distributed/checkpoint/agree.h"

#include <algorithm>

namespace sherd::dist {

std::vector<std::string> all_gather_text(const Group& group, const std::string& mine) {
  const int w = size_of_group(group);
  if (w == 1) return {mine};
  const CollectiveOptions label{.label = "checkpoint"};
  std::vector<Tensor> sizes, texts;
  for (int r = 0; r < w; ++r) sizes.push_back(empty({1}, kInt64));
  group->all_gather(sizes, tensor<int64_t>({int64_t(mine.size())}), label).wait();
  for (auto& s : sizes) texts.push_back(empty({s.item<int64_t>()}, kUInt8));
  Tensor text = empty({int64_t(mine.size())}, kUInt8);
  std::copy(mine.begin(), mine.end(), text.data<uint8_t>());
  group->all_gather(texts, text, label).wait();
  std::vector<std::string> all;
  for (auto& t : texts) all.emplace_back(t.numel() ? t.bytes() : "", size_t(t.numel()));
  return all;
}

void all_or_none(const Group& group, const std::function<void()>& f) {
  std::string mine;
  try {
    f();
  } catch (const DamagedCheckpoint& e) {
    mine = concat("d", e.what());
  } catch (const std::exception& e) {
    mine = concat("e", e.what());
  }
  const std::vector<std::string> all = all_gather_text(group, mine);
  std::string text;
  bool damaged = false;
  const bool alike = std::ranges::all_of(all, [&](auto& e) { return e == all[0]; });
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty() || (alike && r > 0)) continue;
    damaged = damaged || all[r][0] == 'd';
    text += concat(text.empty() ? "" : "\n", alike ? "" : concat("rank ", r, ": "),
                   std::string_view(all[r]).substr(1));
  }
  if (damaged) throw DamagedCheckpoint(text);
  if (!text.empty()) throw Error(text);
}

}  // namespace sherd::dist
