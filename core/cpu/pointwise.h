// CPU loops of pointwise operators. A loop sees only dense blocks of its own compute type; `run`
// (not a template) cuts the index space into blocks and converts, gathers and scatters where an
// operand is strided, broadcast or of another dtype.
#pragma once
#include "core/cpu/isa.h"
#include "core/pointwise.h"

namespace sherd::cpu {

using Loop = void (*)(const void* op, void* out, const void* const* in, int64_t n);
void run(const Strided& s, DType result, const void* op, Loop loop);

template <class Op, class T, int... k>
[[gnu::always_inline]] inline void loop_body(const Op op, ValueOf<Op, T>* __restrict out,
                                             const T* const* in, int64_t n,
                                             std::integer_sequence<int, k...>) {
  const T* p[] = {in[k]...};
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = op.value(Lane<T>{p[k][i]}...).v;
}
template <class Op, class T>
using Arity = std::make_integer_sequence<int, arity<Op>>;
template <class Op, class T>
SHERD_AVX2 void loop_avx2(const void* op, void* out, const void* const* in, int64_t n) {
  loop_body<Op, T>(*static_cast<const Op*>(op), static_cast<ValueOf<Op, T>*>(out),
                   reinterpret_cast<const T* const*>(in), n, Arity<Op, T>{});
}
template <class Op, class T>
SHERD_AVX512 void loop_avx512(const void* op, void* out, const void* const* in, int64_t n) {
  loop_body<Op, T>(*static_cast<const Op*>(op), static_cast<ValueOf<Op, T>*>(out),
                   reinterpret_cast<const T* const*>(in), n, Arity<Op, T>{});
}

template <class Op>
void pointwise_kernel(const Stream&, const Op& op, const Strided& s) {
  auto go = [&]<class T>(Type<T>) {
    run(s, dtype_of<ValueOf<Op, T>>, &op, has_avx512() ? loop_avx512<Op, T> : loop_avx2<Op, T>);
  };
  if (s.compute == kFloat32) return go(Type<float>{});
  if (s.compute == kFloat64) return go(Type<double>{});
  if constexpr (kinds_of<Op> == kNumbers) {
    if (s.compute == kInt32) return go(Type<int32_t>{});
    if (s.compute == kInt64) return go(Type<int64_t>{});
  }
  fail("[", Op::name, "] has no cpu kernel for ", name_of(s.compute));
}

template <class Ops>
bool set_pointwise() {
  Ops::for_each_kernel(
      []<class Op>(Type<Op>) { pointwise<Op>.set(DeviceType::kCPU, pointwise_kernel<Op>); });
  return true;
}

}  // namespace sherd::cpu
