#include "distributed/verify_models.h"

#include <algorithm>

#include "core/philox.h"
#include "distributed/agree.h"

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
  const std::vector<int64_t> hashes =
      all_gather_number(group, int64_t(hash_of(text)), {.label = concat(what, " construction")});
  if (std::ranges::all_of(hashes, [&](int64_t h) { return h == hashes[0]; })) return;
  const auto texts = all_gather_text(group, text);
  auto lines_of = [&](int k) {
    const std::string& t = texts[size_t(k)];
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
