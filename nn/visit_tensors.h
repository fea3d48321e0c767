// visit_tensors(value, f): f(Tensor&) for each tensor inside a value: a Tensor, containers, C
// arrays, optionals, pairs, tuples, maps, and plain structs of such (without base classes), nested
// as one likes. A struct of more than eight fields, or of more than 32 values where it holds C
// arrays, does not compile: group its fields. Other types are passed over.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/tensor.h"

namespace sherd::nn {
namespace visit_detail {

struct Anything {
  template <class T>
  operator T() const;
};
template <size_t>
using Any = Anything;

// How an aggregate can be initialised: by so many values; by some, {} for the next field, and more.
template <class T, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { T{Any<I>()...}; };
}
template <class T, size_t... I, size_t... J>
constexpr bool takes_empty(std::index_sequence<I...>, std::index_sequence<J...>) {
  return requires { T{Any<I>()..., {}, Any<J>()...}; };
}

// [Note: counting fields] Each element of a field that is a C array takes a value of its own, as
// other fields take one each. {} in place of a field leaves fewer values to be given, by the number
// that the field takes: so fields are walked over one by one.
constexpr int kMostValues = 32;
template <class T, int n = kMostValues>
constexpr int values_of() {
  if constexpr (takes<T>(std::make_index_sequence<n>()))
    return n;
  else if constexpr (n == 0)
    return 0;
  else
    return values_of<T, n - 1>();
}
// Of the field that begins at value `at` of `all`.
template <class T, int at, int all, int after = all - at - 1>
constexpr int values_of_field() {
  if constexpr (takes_empty<T>(std::make_index_sequence<at>(), std::make_index_sequence<after>()))
    return all - at - after;
  else if constexpr (after == 0)
    return 1;  // it has no empty value, so it is no array
  else
    return values_of_field<T, at, all, after - 1>();
}
template <class T, int all, int at = 0>
constexpr int fields_from() {
  if constexpr (at >= all)
    return 0;
  else
    return 1 + fields_from<T, all, at + values_of_field<T, at, all>()>();
}
template <class T>
constexpr int fields_of = [] {
  if constexpr (takes<T>(std::make_index_sequence<kMostValues + 1>()))
    return kMostValues + 1;
  else
    return fields_from<T, values_of<T>()>();
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
    static_assert(n <= 8,
                  "visit_tensors: a struct has more than 8 fields, or more than 32 values in C "
                  "arrays: group its fields in structs or containers");
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
