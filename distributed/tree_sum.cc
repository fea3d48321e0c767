#include "distributed/tree_sum.h"

#include <immintrin.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "core/error.h"

namespace sherd::dist {

const char* name_of(ReduceOp op) {
  return std::array{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}[int(op)];
}

void check_reduce_op(const char* op, ReduceOp reduce, DType dtype) {
  if (reduce == ReduceOp::kAvg && !is_float(dtype))
    fail("[", op, "] AVG of ", dtype, " is not defined: use SUM, or a floating dtype");
  if (reduce >= ReduceOp::kBand && is_float(dtype))
    fail("[", op, "] ", reduce, " of ", dtype, " is not defined: use an integer dtype, or bool");
}

namespace {

constexpr int64_t kBlockBytes = 4096;

float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
float widen(Float16 x) { return _cvtsh_ss(x.bits); }
template <class T>
T narrow(float x) {
  if constexpr (std::is_same_v<T, BFloat16>) {  // to nearest even; NaN stays NaN
    const uint32_t b = std::bit_cast<uint32_t>(x), r = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return {uint16_t((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : r)};
  } else {
    return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
  }
}

template <class T>
inline constexpr bool kHalf = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

template <ReduceOp op, class T>
T apply(T a, T b) {
  if constexpr (op == ReduceOp::kBand) {
    return T(a & b);
  } else if constexpr (op == ReduceOp::kBor) {
    return T(a | b);
  } else if constexpr (op == ReduceOp::kBxor) {
    return T(a ^ b);
  } else if constexpr (kHalf<T>) {
    return narrow<T>(apply<op>(widen(a), widen(b)));
  } else if constexpr (op == ReduceOp::kMin) {
    return a < b || a != a ? a : b;
  } else if constexpr (op == ReduceOp::kMax) {
    return a > b || a != a ? a : b;
  } else if constexpr (std::is_same_v<T, bool>) {
    return op == ReduceOp::kProduct ? a & b : a | b;
  } else if constexpr (std::is_integral_v<T>) {  // unsigned: wraps around without overflow
    using U = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return T(op == ReduceOp::kProduct ? U(a) * U(b) : U(a) + U(b));
  } else {
    return op == ReduceOp::kProduct ? a * b : a + b;
  }
}

// Eight float16 a step; the rest, and other types, are vectorised by the compiler.
template <ReduceOp op>
int64_t float16_steps(const Float16* a, const Float16* b, Float16* out, int64_t n) {
  auto load = [](const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    alignas(32) float x[8], y[8];
    _mm256_store_ps(x, load(a + i));
    _mm256_store_ps(y, load(b + i));
    for (int k = 0; k < 8; ++k) x[k] = apply<op>(x[k], y[k]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_load_ps(x), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

// `out` may be `a` or `b`: each element is read before it is written.
template <ReduceOp op, class T>
void combine(const void* a_, const void* b_, void* out_, int64_t n) {
  auto* a = static_cast<const T*>(a_);
  auto* b = static_cast<const T*>(b_);
  auto* out = static_cast<T*>(out_);
  int64_t i = 0;
  if constexpr (std::is_same_v<T, Float16>) i = float16_steps<op>(a, b, out, n);
#pragma GCC ivdep
  for (; i < n; ++i) out[i] = apply<op>(a[i], b[i]);
}
using Combine = void (*)(const void*, const void*, void*, int64_t);

Combine combine_for(ReduceOp op, DType dtype) {
  return visit(dtype, [&]<class T>(Type<T>) -> Combine {
    if constexpr (std::is_integral_v<T>) {
      if (op == ReduceOp::kBand) return combine<ReduceOp::kBand, T>;
      if (op == ReduceOp::kBor) return combine<ReduceOp::kBor, T>;
      if (op == ReduceOp::kBxor) return combine<ReduceOp::kBxor, T>;
    }
    switch (op) {
      case ReduceOp::kProduct:
        return combine<ReduceOp::kProduct, T>;
      case ReduceOp::kMin:
        return combine<ReduceOp::kMin, T>;
      case ReduceOp::kMax:
        return combine<ReduceOp::kMax, T>;
      default:
        return combine<ReduceOp::kSum, T>;
    }
  });
}

struct Tree {
  std::span<const char* const> inputs;
  Combine combine;
  int64_t at, n, bytes;  // of the block

  // T[a, b) of the block, in `to` or, for one rank, where it lies. Only the last step writes `to`:
  // it may be the place of an input that a later child reads.
  const char* node(int a, int b, char* to) const {
    if (b - a == 1) return inputs[a] + at;
    alignas(64) char left[kBlockBytes], right[kBlockBytes];
    const int h = int(std::bit_floor(unsigned(b - a - 1)));
    const char* l = node(a, a + h, left);
    const char* r = node(a + h, b, right);
    combine(l, r, to, n);
    return to;
  }
};

// What AVG does to a sum.
void divide_by(int ranks, DType dtype, char* x, int64_t n) {
  visit(dtype, [&]<class T>(Type<T>) {
    T* p = reinterpret_cast<T*>(x);
    if constexpr (kHalf<T>) {
      for (int64_t i = 0; i < n; ++i) p[i] = narrow<T>(widen(p[i]) / float(ranks));
    } else if constexpr (std::is_floating_point_v<T>) {
      for (int64_t i = 0; i < n; ++i) p[i] /= T(ranks);
    }
  });
}

}  // namespace

void tree_reduce(ReduceOp op, DType dtype, std::span<const char* const> inputs, char* out,
                 int64_t n, int averaged_over) {
  check_reduce_op("reduce", op, dtype);
  const int ranks = int(inputs.size());
  const int64_t element = size_of(dtype);
  const Combine combine = combine_for(op, dtype);
  if (ranks == 1 && out != inputs[0]) std::memcpy(out, inputs[0], n * element);
  if (ranks == 2) combine(inputs[0], inputs[1], out, n);
  for (int64_t i = 0; ranks > 2 && i < n; i += kBlockBytes / element) {
    const int64_t m = std::min(n - i, kBlockBytes / element);
    Tree{inputs, combine, i * element, m, m * element}.node(0, ranks, out + i * element);
  }
  const int divisor = averaged_over ? averaged_over : ranks;
  if (op == ReduceOp::kAvg && divisor > 1) divide_by(divisor, dtype, out, n);
}

}  // namespace sherd::dist
