#include "distributed/verify_models.h"

#include <algorithm>

#include "core/philox.h"

namespace sherd::dist {
namespace {

// A word's worth of a text, the same on every machine.
uint64_t hash_of(const std::string& text) { return philox_key(0, text.data(), text.size()); }

}  // namespace

void verify_equal_on_all_ranks(const char* what, const Group& group,
                               const std::vector<std::string>& lines) {
  const int w = group->size();
  if (w == 1) return;
  std::string text;
  for (auto& l : lines) text += l + "\n";
  Tensor mine = empty({2}, kInt64), all = empty({2 * w}, kInt64);
  mine.data<int64_t>()[0] = int64_t(hash_of(text));
  mine.data<int64_t>()[1] = int64_t(text.size());
  auto gather = [&](const Tensor& out, const Tensor& in) {
    std::vector<Tensor> outs;
    for (int k = 0; k < w; ++k)
      outs.push_back(out.as_strided_raw({in.numel()}, {1}, k * in.numel()));
    group->all_gather(outs, in, {.label = concat(what, " construction")}).wait();
  };
  gather(all, mine);
  const int64_t* h = all.data<int64_t>();
  bool equal = true;
  int64_t longest = 0;
  for (int k = 0; k < w; ++k)
    equal = equal && h[2 * k] == h[0], longest = std::max(longest, h[2 * k + 1]);
  if (equal) return;
  Tensor bytes = zeros({longest}, kUInt8), all_bytes = empty({longest * w}, kUInt8);
  std::copy(text.begin(), text.end(), bytes.data<uint8_t>());
  gather(all_bytes, bytes);
  auto lines_of = [&](int k) {
    const auto* p = reinterpret_cast<const char*>(all_bytes.data<uint8_t>() + k * longest);
    std::string t(p, size_t(h[2 * k + 1]));
    std::vector<std::string> r;
    for (size_t at = 0; at < t.size();) {
      const size_t end = t.find('\n', at);
      r.push_back(t.substr(at, end - at));
      at = end + 1;
    }
    return r;
  };
  const auto first = lines_of(0);
  for (int k = 1; k < w; ++k) {
    const auto other = lines_of(k);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "nothing more",
                        b = i < other.size() ? other[i] : "nothing more";
      if (a != b)
        fail("[", what, "] ranks hold different models: rank 0 has ", a, ", rank ", k, " has ", b,
             ". Build the same model with the same options on every rank");
    }
  }
}

}  // namespace sherd::dist
