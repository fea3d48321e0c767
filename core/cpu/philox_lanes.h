// Philox for a run of numbered elements, many counters side by side.
#pragma once
#include <algorithm>

#include "core/generator.h"
#include "core/philox.h"

namespace sherd::cpu {

// [Note: numbering of random words] Elements come in groups of 1024. In group q, word w of counter
// 256 q + c is that of element 1024 q + 256 w + c: so counters that are computed side by side write
// neighbours, and an element's word follows from its number alone.
inline constexpr int64_t kGroup = 1024, kCounters = kGroup / 4;

struct RandomWords {
  alignas(64) uint32_t word[4][kCounters];
};

[[gnu::always_inline]] inline void make_words(const Generator::Draw& draw, int64_t group,
                                              RandomWords& words) {
  const uint64_t first = uint64_t(group) * kCounters;
  const uint32_t low = uint32_t(first), high = uint32_t(first >> 32);
  for (uint32_t c = 0; c < kCounters; ++c) {
    // No carry into the high half: `first` is a multiple of the number of counters.
    uint32_t c0 = low + c, c1 = high, c2 = uint32_t(draw.number), c3 = uint32_t(draw.number >> 32);
    uint32_t k0 = uint32_t(draw.key), k1 = uint32_t(draw.key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words.word[0][c] = c0, words.word[1][c] = c1, words.word[2][c] = c2, words.word[3][c] = c3;
  }
}

// f(group, first, begin, end) for each group that has elements of [begin, end): its number, its
// first element, and which of its elements are wanted. `size` is that of a group.
template <class F>
void for_groups(int64_t begin, int64_t end, int64_t size, F f) {
  for (int64_t group = begin / size; group * size < end; ++group)
    f(group, group * size, std::max(begin, group * size), std::min(end, (group + 1) * size));
}

}  // namespace sherd::cpu
