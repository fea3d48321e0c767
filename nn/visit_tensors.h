// visit_tensors(value, f): f(Tensor&) for each tensor inside a value: a Tensor, containers,
// optionals, pairs, tuples, maps, and plain structs of such (up to eight fields, without base
// classes), nested as one likes. Others are passed over.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>

#include "core/tensor.h"

namespace sherd::nn {
namespace visit_detail {

struct Anything {
  template <class T>
  operator T() const;
};
template <class T, class... A>
concept BraceConstructible = requires {
  T{std::declval<A>()...};
};
template <class T>
constexpr int fields_of = [] {
  using A = Anything;
  if constexpr (BraceConstructible<T, A, A, A, A, A, A, A, A, A>)
    return 0;  // more than eight: passed over
  else if constexpr (BraceConstructible<T, A, A, A, A, A, A, A, A>)
    return 8;
  else if constexpr (BraceConstructible<T, A, A, A, A, A, A, A>)
    return 7;
  else if constexpr (BraceConstructible<T, A, A, A, A, A, A>)
    return 6;
  else if constexpr (BraceConstructible<T, A, A, A, A, A>)
    return 5;
  else if constexpr (BraceConstructible<T, A, A, A, A>)
    return 4;
  else if constexpr (BraceConstructible<T, A, A, A>)
    return 3;
  else if constexpr (BraceConstructible<T, A, A>)
    return 2;
  else if constexpr (BraceConstructible<T, A>)
    return 1;
  else
    return 0;
}();
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept OptionalLike = requires(T v) {
  v.has_value();
  *v;
};

}  // namespace visit_detail

template <class T, class F>
void visit_tensors(T& value, const F& f) {
  using namespace visit_detail;
  using V = std::remove_const_t<T>;
  if constexpr (std::is_same_v<V, Tensor>) {
    if constexpr (!std::is_const_v<T>)
      if (value.defined()) f(value);
  } else if constexpr (std::is_arithmetic_v<V> || std::is_pointer_v<V> || std::is_enum_v<V> ||
                       std::is_convertible_v<V, std::string_view>) {
  } else if constexpr (OptionalLike<V>) {
    if (value.has_value()) visit_tensors(*value, f);
  } else if constexpr (std::ranges::range<T>) {
    for (auto&& v : value) visit_tensors(v, f);
  } else if constexpr (TupleLike<V>) {
    std::apply([&](auto&... v) { (visit_tensors(v, f), ...); }, value);
  } else if constexpr (std::is_aggregate_v<V>) {
    constexpr int n = fields_of<V>;
    if constexpr (n == 8) {
      auto& [a, b, c, d, e, g, h, i] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f), visit_tensors(d, f);
      visit_tensors(e, f), visit_tensors(g, f), visit_tensors(h, f), visit_tensors(i, f);
    } else if constexpr (n == 7) {
      auto& [a, b, c, d, e, g, h] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f), visit_tensors(d, f);
      visit_tensors(e, f), visit_tensors(g, f), visit_tensors(h, f);
    } else if constexpr (n == 6) {
      auto& [a, b, c, d, e, g] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f), visit_tensors(d, f);
      visit_tensors(e, f), visit_tensors(g, f);
    } else if constexpr (n == 5) {
      auto& [a, b, c, d, e] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f), visit_tensors(d, f),
          visit_tensors(e, f);
    } else if constexpr (n == 4) {
      auto& [a, b, c, d] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f), visit_tensors(d, f);
    } else if constexpr (n == 3) {
      auto& [a, b, c] = value;
      visit_tensors(a, f), visit_tensors(b, f), visit_tensors(c, f);
    } else if constexpr (n == 2) {
      auto& [a, b] = value;
      visit_tensors(a, f), visit_tensors(b, f);
    } else if constexpr (n == 1) {
      auto& [a] = value;
      visit_tensors(a, f);
    }
  }
}

}  // namespace sherd::nn
