// Reductions: one struct is the whole operator. Its State is a few fields of type V (values) or I
// (as many integers); the same add and merge run over vectors of 64 bytes, single elements, and
// CUDA threads.
//
//     struct Sum {
//       static constexpr auto name = "sum";
//       static constexpr auto gives = kWide;
//       template <class V, class I> struct State { V sum{}; };
//       // step: elements that s has seen before
//       constexpr void add(auto& s, auto x, int step) const { s.sum = s.sum + x; }
//       // of n and m elements
//       constexpr void merge(auto& s, auto o, double n, double m) const { s.sum = s.sum + o.sum; }
//       constexpr auto result(auto s, double n) const { return s.sum; }
//       // of Tensors; broadcast to x by the caller
//       auto grad(auto g, auto x, auto y, const Over&) const { return g; }
//     };
//
// The order of all additions follows from the shape alone: same bits for any number of threads, on
// AVX2 and on AVX-512.
#pragma once
#include "core/kernel.h"
#include "core/lane.h"
#include "core/pointwise.h"

namespace sherd {

// in_float64: computed in float64 whatever the input's dtype, the result rounded to it.
template <class Op>
constexpr bool in_float64 = requires {
  Op::in_float64;
};
enum Gives {
  kSame,
  kWide,
  kIndex
};  // the input's dtype; that, but int64 for integers; an int64 position
template <class Op>
constexpr Gives gives_of = [] {
  if constexpr (requires { Op::gives; })
    return Op::gives;
  else
    return kSame;
}();
struct Over {  // what was reduced
  Dims dims;
  int64_t count;
};
template <class V>
struct ScalarOf {
  using type = V;
};
template <class V>
requires requires(V v) { v[0]; }
struct ScalarOf<V> {
  using type = std::decay_t<decltype(V{}[0])>;
};
template <class L>
constexpr L lowest() {
  using T = typename ScalarOf<decltype(L{}.v)>::type;
  return spread<decltype(L{}.v)>(std::floating_point<T> ? -std::numeric_limits<T>::infinity()
                                                        : std::numeric_limits<T>::lowest());
}

struct Axes {
  int n = 0;
  int64_t sizes[kMaxDims], strides[kMaxDims], count = 1;
};  // innermost first, strides in bytes
struct ReductionPlan {
  const char* in;
  DType dtype, compute;
  Axes kept, reduced;
  void* out;  // dense, of the compute type, or int64 for an index
};
template <class Op>
inline constinit Kernel<void(const Op&, const ReductionPlan&)> reduction{Op::name};

ReductionPlan plan_reduction(const char* op, const Tensor& x, const Dims& dims, Dims& kept_sizes,
                             Over& over, bool needs_elements);
inline DType reduced_type(const char* op, DType d, Gives gives, Kinds kinds) {
  if (gives == kIndex) return kInt64;
  if (is_float(d)) return d;
  if (kinds == kFloats) fail("[", op, "] needs a floating point tensor, not ", name_of(d));
  return gives == kWide ? kInt64 : d;
}

}  // namespace sherd
