#include "core/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// Registers of W doubles: 4 on AVX2, 8 on AVX-512. The sums are exact, so W does not show in them.
template <int W>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * W)));
  typedef double Doubles __attribute__((vector_size(8 * W)));
  typedef int64_t Longs __attribute__((vector_size(8 * W)));
  typedef int32_t Ints __attribute__((vector_size(8 * W)));
};

constexpr int kBlock = 2048;  // elements whose sums on one grid fit a double's 53 bits
constexpr int64_t kPiece = 64 * kBlock;
constexpr int kPadding = 16;  // blocks are padded with zeros to a multiple of it
constexpr int kGrids = 3;     // tried in registers; nearly always they leave nothing
constexpr uint32_t kInfBits = 0x7f800000;

double power_of_two(int n) { return std::bit_cast<double>(uint64_t(n + 1023) << 52); }
int exponent_of_limb(int k) { return ExactSum::kLowest + ExactSum::kBits * k; }

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }

template <int W>
[[gnu::always_inline]] inline uint32_t largest_magnitude(const float* x, int n) {
  typename Vectors<W>::Ints m{};
  for (int i = 0; i < n; i += 2 * W) {
    typename Vectors<W>::Ints v;
    std::memcpy(&v, x + i, sizeof v);
    v &= 0x7fffffff;
    m = v > m ? v : m;
  }
  int32_t r = 0;
  for (int i = 0; i < 2 * W; ++i) r = std::max(r, m[i]);
  return uint32_t(r);
}

template <int W, bool squares>
[[gnu::always_inline]] inline auto terms(const float* x) {
  using Doubles = typename Vectors<W>::Doubles;
  using Longs = typename Vectors<W>::Longs;
  typename Vectors<W>::Floats f;
  std::memcpy(&f, x, sizeof f);
  const Doubles v = __builtin_convertvector(f, Doubles);
  if (squares) return v * v;
  // By bits, so that -0 becomes 0: what is left of a term is compared with 0 by bits.
  return reinterpret_cast<Doubles>(reinterpret_cast<Longs>(v) & 0x7fffffffffffffff);
}
// Takes from q its part on the grid of `magic` = 1.5 * 2^(a + 52) and adds it to the sum.
template <class Doubles>
[[gnu::always_inline]] inline void strip(Doubles& q, double magic, Doubles& sum) {
  const Doubles t = (q + magic) - magic;
  sum += t;
  q -= t;
}
template <class Longs>
[[gnu::always_inline]] inline bool any(const Longs& bits) {
  int64_t r = 0;
  for (size_t i = 0; i < sizeof bits / 8; ++i) r |= bits[i];
  return r != 0;
}
template <class Doubles>
[[gnu::always_inline]] inline int64_t in_units_of_limb(const Doubles& sum, int k) {
  double r = 0;
  for (size_t i = 0; i < sizeof sum / 8; ++i) r += sum[i];
  return int64_t(r * power_of_two(-exponent_of_limb(k)));
}

// Adds a block of finite float32 values, padded; see [Note: exact sums].
template <int W, bool squares>
[[gnu::always_inline]] inline void add_block(const float* x, int n, uint32_t largest,
                                             int64_t* limbs) {
  using Doubles = typename Vectors<W>::Doubles;
  using Longs = typename Vectors<W>::Longs;
  // |x| < 2^e, and terms of this block lie below the grid above `top`.
  const int e = std::max(int(largest >> 23), 1) - 126, bound = squares ? 2 * e : e;
  const int top = (bound - ExactSum::kLowest - 1) / ExactSum::kBits;
  double magic[kGrids];
  for (int g = 0; g < kGrids; ++g) magic[g] = 1.5 * power_of_two(exponent_of_limb(top - g) + 52);
  Doubles sum[kGrids] = {};
  Longs left{};
  for (int i = 0; i < n; i += W) {
    Doubles q = terms<W, squares>(x + i);
    for (int g = 0; g < kGrids; ++g) strip(q, magic[g], sum[g]);
    left |= reinterpret_cast<Longs>(q);
  }
  if (!any(left)) {
    for (int g = 0; g < kGrids; ++g) limbs[top - g] += in_units_of_limb(sum[g], top - g);
    return;
  }
  Doubles rest[kBlock / W];
  for (int i = 0; i < n; i += W) rest[i / W] = terms<W, squares>(x + i);
  for (int k = top; any(left); --k) {
    const double m = 1.5 * power_of_two(exponent_of_limb(k) + 52);
    Doubles s{};
    left = Longs{};
    for (int i = 0; i < n / W; ++i) {
      strip(rest[i], m, s);
      left |= reinterpret_cast<Longs>(rest[i]);
    }
    limbs[k] += in_units_of_limb(s, k);
  }
}

struct Loops {
  uint32_t (*largest)(const float* x, int n);
  void (*squares)(const float* x, int n, uint32_t largest, int64_t* limbs);
  void (*values)(const float* x, int n, uint32_t largest, int64_t* limbs);
};
SHERD_AVX2 uint32_t largest_avx2(const float* x, int n) { return largest_magnitude<4>(x, n); }
SHERD_AVX512 uint32_t largest_avx512(const float* x, int n) { return largest_magnitude<8>(x, n); }
template <bool squares>
SHERD_AVX2 void add_avx2(const float* x, int n, uint32_t largest, int64_t* limbs) {
  add_block<4, squares>(x, n, largest, limbs);
}
template <bool squares>
SHERD_AVX512 void add_avx512(const float* x, int n, uint32_t largest, int64_t* limbs) {
  add_block<8, squares>(x, n, largest, limbs);
}
const Loops& loops() {
  static constexpr Loops narrow{largest_avx2, add_avx2<true>, add_avx2<false>};
  static constexpr Loops wide{largest_avx512, add_avx512<true>, add_avx512<false>};
  return has_avx512() ? wide : narrow;
}

// mantissa * 2^exponent, in digits; the exponent is at least kLowest.
void deposit(unsigned __int128 mantissa, int exponent, int64_t* limbs) {
  int k = (exponent - ExactSum::kLowest) / ExactSum::kBits;
  const int shift = (exponent - ExactSum::kLowest) % ExactSum::kBits;
  constexpr uint64_t mask = (uint64_t(1) << ExactSum::kBits) - 1;
  limbs[k++] += int64_t((uint64_t(mantissa) << shift) & mask);
  for (mantissa >>= ExactSum::kBits - shift; mantissa; mantissa >>= ExactSum::kBits)
    limbs[k++] += int64_t(uint64_t(mantissa) & mask);
}

// |x| to the power p into state, by integers. Powers other than 1 and 2 are rounded to double.
void add_one(double x, double p, int64_t* state) {
  x = std::fabs(x);
  if (p != 1 && p != 2) x = std::pow(x, p);
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const int biased = int(bits >> 52);
  if (biased == 0x7ff) {
    ++state[x == x ? ExactSum::kInfs : ExactSum::kNaNs];
    return;
  }
  const uint64_t mantissa = (bits & 0xfffffffffffff) | uint64_t(biased != 0) << 52;
  const int exponent = std::max(biased, 1) - 1075;
  if (p == 2)
    deposit((unsigned __int128)(mantissa)*mantissa, 2 * exponent, state);
  else
    deposit(mantissa, exponent, state);
}

// f(block, n): x[begin, end) as float32, a block at a time, padded with zeros.
template <class F>
void for_blocks(const Tensor& x, int64_t begin, int64_t end, F f) {
  const int64_t size = size_of(x.dtype());
  const Convert to_float = convert(kFloat32, x.dtype());
  alignas(64) float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, end - i));
    const int padded = (n + kPadding - 1) / kPadding * kPadding;
    const char* from = x.bytes() + i * size;
    if (x.dtype() == kFloat32 && n == padded && uintptr_t(from) % alignof(float) == 0) {
      f(reinterpret_cast<const float*>(from), n, buffer);
      continue;
    }
    to_float(reinterpret_cast<char*>(buffer), sizeof(float), from, size, n);
    std::fill(buffer + n, buffer + padded, 0.f);
    f(static_cast<const float*>(buffer), padded, buffer);
  }
}

void add_floats(const Tensor& x, int64_t begin, int64_t end, bool squares, int64_t* state) {
  const Loops& loop = loops();
  for_blocks(x, begin, end, [&](const float* block, int n, float* buffer) {
    uint32_t largest = loop.largest(block, n);
    if (largest >= kInfBits) {  // counted, and taken out
      for (int i = 0; i < n; ++i) {
        const uint32_t m = magnitude(block[i]);
        state[ExactSum::kInfs] += m == kInfBits;
        state[ExactSum::kNaNs] += m > kInfBits;
        buffer[i] = m < kInfBits ? block[i] : 0.f;
      }
      block = buffer;
      largest = loop.largest(block, n);
    }
    if (largest) (squares ? loop.squares : loop.values)(block, n, largest, state);
  });
}

void add_doubles(const Tensor& x, int64_t begin, int64_t end, double p, int64_t* state) {
  const double* v = x.data<double>();
  for (int64_t i = begin; i < end; ++i) add_one(v[i], p, state);
}

// The largest |x| as a double's bits, in which NaN is above infinity.
int64_t largest_bits(const Tensor& x, int64_t begin, int64_t end) {
  int64_t r = 0;
  if (x.dtype() == kFloat64) {
    const auto* v = reinterpret_cast<const int64_t*>(x.bytes());
    for (int64_t i = begin; i < end; ++i) r = std::max(r, v[i] & ~(int64_t(1) << 63));
    return r;
  }
  uint32_t largest = 0;
  for_blocks(x, begin, end, [&](const float* block, int n, float*) {
    largest = std::max(largest, loops().largest(block, n));
  });
  return std::bit_cast<int64_t>(double(std::bit_cast<float>(largest)));
}

void exact_sum(const Stream&, const Tensor& x, double p, const Tensor& state) {
  int64_t* total = state.data<int64_t>();
  std::mutex mutex;
  parallel_for(x.numel(), kPiece, [&](int64_t begin, int64_t end) {
    if (p == ExactSum::kInfinity) {
      const int64_t bits = largest_bits(x, begin, end);
      std::lock_guard lock(mutex);
      total[0] = std::max(total[0], bits);
      return;
    }
    int64_t piece[ExactSum::kStateSize] = {};
    if (x.dtype() == kFloat64)
      add_doubles(x, begin, end, p, piece);
    else if (p == 1 || p == 2)
      add_floats(x, begin, end, p == 2, piece);
    else
      for_blocks(x, begin, end, [&](const float* block, int n, float*) {
        for (int i = 0; i < n; ++i) add_one(block[i], p, piece);
      });
    ExactSum::carry(piece);
    std::lock_guard lock(mutex);
    for (int i = 0; i < ExactSum::kStateSize; ++i) total[i] += piece[i];
  });
  if (p != ExactSum::kInfinity) ExactSum::carry(total);
}

const Register registered{exact_sum_kernel, DeviceType::kCPU, exact_sum};

}  // namespace
}  // namespace sherd::cpu
