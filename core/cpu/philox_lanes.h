// Philox for a run of numbered elements, sixteen counters at a time.
#pragma once
#include <algorithm>

#include "core/generator.h"
#include "core/philox.h"

namespace sherd::cpu {

// [Note: numbering of random words] Elements come in groups of 64. In group q, word w of counter
// 16 q + l is that of element 64 q + 16 w + l: so sixteen counters, computed side by side, write
// 64 neighbours without a shuffle, and an element's word follows from its number alone.
inline constexpr int64_t kGroup = 64;
inline constexpr int kCounters = 16;

[[gnu::always_inline]] inline void philox_group(const Generator::Draw& draw, int64_t group,
                                                uint32_t* __restrict words) {
  const uint64_t first = uint64_t(group) * kCounters;
  uint32_t c[4][kCounters];
  for (int l = 0; l < kCounters; ++l) {
    c[0][l] = uint32_t(first) + uint32_t(l);  // no carry: first is a multiple of sixteen
    c[1][l] = uint32_t(first >> 32);
    c[2][l] = uint32_t(draw.number);
    c[3][l] = uint32_t(draw.number >> 32);
  }
  uint32_t k0 = uint32_t(draw.key), k1 = uint32_t(draw.key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < kCounters; ++l) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c[0][l], p1 = uint64_t(0xCD9E8D57u) * c[2][l];
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c[1][l] ^ k0, n2 = uint32_t(p0 >> 32) ^ c[3][l] ^ k1;
      c[1][l] = uint32_t(p1), c[3][l] = uint32_t(p0), c[0][l] = n0, c[2][l] = n2;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int w = 0; w < 4; ++w)
    for (int l = 0; l < kCounters; ++l) words[w * kCounters + l] = c[w][l];
}

// f(block, first, begin, end) for runs of at most kRun elements that begin with a group: numbers
// [first, first + kRun), of which [begin, end) are wanted.
inline constexpr int64_t kRun = 16 * kGroup;
template <class F>
void for_runs_of_groups(int64_t begin, int64_t end, F f) {
  for (int64_t first = begin / kRun * kRun; first < end; first += kRun)
    f(first, std::max(begin, first), std::min(end, first + kRun));
}

}  // namespace sherd::cpu
