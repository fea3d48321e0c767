#include "distributed/ddp_buckets.h"

#include <algorithm>
#include <map>

namespace sherd::dist {

std::vector<std::vector<int>> assign_buckets(const std::vector<int64_t>& bytes,
                                             const std::vector<DType>& dtypes, int64_t first_limit,
                                             int64_t limit) {
  struct Open {
    std::vector<int> parameters;
    int64_t bytes = 0;
    bool first = true;
  };
  std::map<DType, Open> open;
  std::vector<std::vector<int>> buckets;
  auto close = [&](Open& o) {
    buckets.push_back(std::move(o.parameters));
    o = {{}, 0, false};
  };
  for (size_t i = 0; i < bytes.size(); ++i) {
    Open& o = open[dtypes[i]];
    o.parameters.push_back(int(i));
    o.bytes += bytes[i];
    if (o.bytes >= (o.first ? first_limit : limit)) close(o);
  }
  for (auto& [dtype, o] : open)
    if (!o.parameters.empty()) close(o);
  std::sort(buckets.begin(), buckets.end(), [](auto& a, auto& b) { return a[0] < b[0]; });
  return buckets;
}

}  // namespace sherd::dist
