// Philox 4x32-10, a counter-based generator: the n-th block of four words follows from (key, n)
// alone. Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
#pragma once
#include <array>
#include <cstdint>

namespace sherd {

constexpr std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_high,
                                         uint64_t counter_low) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
  uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// Uniform in [0, 1), 24 bits; and in [0, 1), 53 bits of two words.
constexpr float uniform_float(uint32_t word) { return float(word >> 8) * 0x1p-24f; }
constexpr double uniform_double(uint32_t high, uint32_t low) {
  return double((uint64_t(high) << 32 | low) >> 11) * 0x1p-53;
}

// A key from a seed and a text (FNV-1a, then mixed): a parameter's stream follows from (seed,
// name).
constexpr uint64_t philox_key(uint64_t seed, const char* text, uint64_t length) {
  uint64_t h = 0xcbf29ce484222325u;
  for (uint64_t i = 0; i < length; ++i) h = (h ^ uint8_t(text[i])) * 0x100000001b3u;
  h ^= seed + 0x9E3779B97F4A7C15u + (h << 6) + (h >> 2);
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

}  // namespace sherd
