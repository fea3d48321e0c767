// Pointwise operators: one struct is the whole operator.
//
//     struct Silu {
//       static constexpr auto name = "silu";
//       constexpr auto value(auto x) const { return x * sigmoid(x); }
//       constexpr auto grad(auto g, auto x, auto y) const {
//         auto s = sigmoid(x);
//         return g * (s + y * (1 - s));
//       }
//     };
//     Tensor silu(const Tensor& x) { return call(Silu{}, x); }     // autograd/pointwise.h
//
// The two formulas are compiled for several kinds of argument, each of which has +, *, exp, ...:
//     Lane<float|double|int..>   AVX2 and AVX-512 loops, forward and fused backward
//                                (cpu/pointwise.h); a CUDA thread reads the same
//     Tensor                     the derivative of the derivative, and a composed reference
//     Uses                       at compile time: which tensors a derivative reads, so only those
//                                are saved
// Members of the struct are the operator's numbers (slope, minimum). With several inputs:
// `template <int I> grad(g, a, b, y)`. Optional: kinds = kNumbers (integers stay integers; else
// they become float32), condition = 0 (that input takes no part in promotion and has no gradient).
// A value() that returns a comparison gives a bool tensor. For free: broadcasting, promotion, any
// strides, all dtypes, in place, double backward, the tests.
#pragma once
#include "core/kernel.h"
#include "core/lane.h"
#include "core/strided.h"

namespace sherd {

// ---- Uses: the formula's arguments as bits
struct Uses {
  unsigned tensors = 0;  // bit 0: g, bits 1..N: inputs, bit N + 1: y
  int operations = 0;    // 0: the derivative is g itself
};
template <class T>
constexpr Uses uses(T) {
  return {};
}
constexpr Uses uses(Uses u) { return u; }
template <class... T>
constexpr Uses together(T... t) {
  return {(0u | ... | uses(t).tensors), 1 + (0 + ... + uses(t).operations)};
}
template <class A, class B>
concept WithUses = std::same_as<A, Uses> || std::same_as<B, Uses>;
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator+(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator-(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator*(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator/(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator<(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator>(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator<=(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator>=(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator==(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator!=(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator&(A a, B b) { return together(a, b); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses operator|(A a, B b) { return together(a, b); }
constexpr Uses operator-(Uses a) { return together(a); }
template <class A, class B>
constexpr Uses where(Uses c, A a, B b) {
  return together(c, a, b);
}
constexpr Uses exp(Uses a) { return together(a); }
constexpr Uses tanh(Uses a) { return together(a); }
constexpr Uses erf(Uses a) { return together(a); }
constexpr Uses log(Uses a) { return together(a); }
constexpr Uses sqrt(Uses a) { return together(a); }
constexpr Uses abs(Uses a) { return together(a); }
constexpr Uses sigmoid(Uses a) { return together(a); }
template <class A, class B>
requires WithUses<A, B>
constexpr Uses pow(A a, B b) { return together(a, b); }

// ---- what a struct says, with defaults
enum Kinds { kFloats, kNumbers };
template <class Op>
constexpr Kinds kinds_of = [] {
  if constexpr (requires { Op::kinds; })
    return Op::kinds;
  else
    return kFloats;
}();
template <class Op>
constexpr int condition_of = [] {
  if constexpr (requires { Op::condition; })
    return Op::condition;
  else
    return -1;
}();
using AnyLane = Lane<float>;
template <class Op>
constexpr int arity = [] {
  if constexpr (requires { Op::arity; })
    return Op::arity;
  else if constexpr (requires(Op o, AnyLane x) { o.value(x); })
    return 1;
  else if constexpr (requires(Op o, AnyLane x) { o.value(x, x); })
    return 2;
  else
    return 3;
}();
template <class Op, class T, int... k>
auto value_type(std::integer_sequence<int, k...>)
    -> decltype(std::declval<Op>().value((void(k), Lane<T>{})...).v);
template <class Op, class T>
using ValueOf = decltype(value_type<Op, T>(std::make_integer_sequence<int, arity<Op>>{}));
template <class Op>
constexpr bool gives_bool = std::same_as<ValueOf<Op, float>, bool>;

template <int I, class Op, class... A>
constexpr auto grad_of(const Op& op, const A&... a) {
  if constexpr (requires { op.grad(a...); })
    return op.grad(a...);
  else
    return op.template grad<I>(a...);
}
template <class Op>
constexpr bool differentiable = requires(Op o, AnyLane x) {
  o.grad(x, x, x);
}
|| requires(Op o, AnyLane x) { o.template grad<1>(x, x, x, x); }
|| requires(Op o, AnyLane x) { o.template grad<1>(x, x, x, x, x); };
// The derivative by input I is itself a pointwise operator of g, the inputs and y: the fused
// backward.
template <class Op, int I>
struct Grad {
  static constexpr auto name = Op::name;
  static constexpr int arity = sherd::arity<Op> + 2;
  Op op;
  constexpr auto value(auto... a) const { return grad_of<I>(op, a...); }
};
template <class Op, int I>
constexpr Uses uses_of = []<int... k>(std::integer_sequence<int, k...>) {
  return uses(grad_of<I>(Op{}, Uses{1u << k}...));
}
(std::make_integer_sequence<int, arity<Op> + 2>{});

// ---- the slot
template <class Op>
inline constinit Kernel<void(const Op&, const Strided&)> pointwise{Op::name};

template <class... Ops>
struct List {
  // f(Type<Op>{}) for each operator and for each of its derivatives
  template <class F>
  static void for_each_kernel(F f) {
    auto one = [&]<class Op, int... I>(Type<Op>, std::integer_sequence<int, I...>) {
      f(Type<Op>{});
      if constexpr (differentiable<Op>)
        (
            [&] {
              if constexpr (I != condition_of<Op>)
                if constexpr (uses_of<Op, I>.operations > 0) f(Type<Grad<Op, I>>{});
            }(),
            ...);
    };
    (one(Type<Ops>{}, std::make_integer_sequence<int, arity<Ops>>{}), ...);
  }
};

// ---- raw calls
struct Plan {
  Dims sizes;
  DType common, result;
  Device device;
};
// Checks devices, broadcasts and promotes. `condition`: the input that takes no part in promotion,
// or -1.
Plan plan(const char* op, std::span<const Tensor* const> inputs, int condition, Kinds kinds,
          bool gives_bool);
// An unset output, with the strides of the inputs where they agree.
Tensor output(const Plan& plan, std::span<const Tensor* const> inputs);
// Error unless `out` can take the plan's result: its shape, its dtype's category, not expanded.
void check_writable(const char* op, const Tensor& out, const Plan& plan, bool in_place);
// True if several elements lie in one place: what is written to one would be read in others.
bool is_expanded(const Tensor& x);
// Error if `out` is expanded.
void check_not_expanded(const char* op, const Tensor& out);

// Error if `out` and `in` share memory and not element for element, so that writing may change what
// is still to be read. Found only of tensors that fill a range of memory; others may interleave.
void check_no_overlap(const char* op, const Tensor& out, const Tensor& in);

// Runs the kernel: out = op(in...), computed in the type that fits `common`.
template <class Op, class... In>
void evaluate(const Op& op, const Tensor& out, DType common, const In&... in) {
  if (out.numel() == 0 || out.device().is_meta()) return;
  const Tensor* all[] = {&out, &in...};
  Strided s(out.sizes(), all);
  s.compute = compute_type(common);
  pointwise<Op>(out.device(), common)(op, s);
}

}  // namespace sherd
