#include "examples/support/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/philox.h"

namespace examples {

using namespace sherd;

std::vector<uint16_t> generate(const std::function<Tensor(const Tensor&)>& logits,
                               std::vector<uint16_t> ids, const GenerateOptions& o) {
  NoGrad off;
  if (ids.empty()) ids.push_back(0);
  for (int64_t n = 0; n < o.max_new_tokens; ++n) {
    const int64_t t = std::min<int64_t>(int64_t(ids.size()), o.context);
    const std::vector<int64_t> window(ids.end() - t, ids.end());
    const Tensor last =
        logits(tensor(window).view({1, t})).select(1, t - 1).to(kFloat64).contiguous();
    const int64_t v = o.vocab_size > 0 ? std::min(o.vocab_size, last.numel()) : last.numel();
    const double* x = last.data<double>();
    std::vector<int64_t> order(static_cast<size_t>(v));
    std::iota(order.begin(), order.end(), 0);
    const int64_t k = o.temperature == 0 ? 1 : o.top_k > 0 ? std::min(o.top_k, v) : v;
    std::partial_sort(order.begin(), order.begin() + k, order.end(),
                      [&](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    std::vector<double> p;
    for (int64_t i = 0; i < k; ++i)
      p.push_back(o.temperature == 0 ? 1 : std::exp((x[order[i]] - x[order[0]]) / o.temperature));
    const auto words = philox(o.seed, 0, uint64_t(n));
    double u = uniform_double(words[0], words[1]) * std::accumulate(p.begin(), p.end(), 0.0);
    int64_t pick = 0;
    while (pick + 1 < k && u >= p[pick]) u -= p[pick++];
    ids.push_back(uint16_t(order[pick]));
  }
  return ids;
}

}  // namespace examples
