// Arithmetic, comparisons and choice. See pointwise.h for how to read and extend this.
#pragma once
#include <limits>

#include "core/ops/copy.h"
#include "core/pointwise.h"

namespace sherd {

struct Add {
  static constexpr auto name = "add";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a + b; }
  template <int I>
  constexpr auto grad(auto g, auto, auto, auto) const {
    return g;
  }
};
struct AddScaled {
  static constexpr auto name = "add";
  static constexpr auto kinds = kNumbers;
  double alpha;
  constexpr auto value(auto a, auto b) const { return a + b * alpha; }
  template <int I>
  constexpr auto grad(auto g, auto, auto, auto) const {
    if constexpr (I == 0)
      return g;
    else
      return g * alpha;
  }
};
struct Sub {
  static constexpr auto name = "sub";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a - b; }
  template <int I>
  constexpr auto grad(auto g, auto, auto, auto) const {
    if constexpr (I == 0)
      return g;
    else
      return -g;
  }
};
struct Mul {
  static constexpr auto name = "mul";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a * b; }
  template <int I>
  constexpr auto grad(auto g, auto a, auto b, auto) const {
    if constexpr (I == 0)
      return g * b;
    else
      return g * a;
  }
};
struct Div {
  static constexpr auto name = "div";
  constexpr auto value(auto a, auto b) const { return a / b; }
  template <int I>
  constexpr auto grad(auto g, auto, auto b, auto y) const {
    if constexpr (I == 0)
      return g / b;
    else
      return -g * y / b;
  }
};
struct Pow {
  static constexpr auto name = "pow";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return pow(a, b); }
  template <int I>
  constexpr auto grad(auto g, auto a, auto b, auto y) const {
    if constexpr (I == 0)
      return g * where(b == 0, b * 0, b * pow(a, b - 1));
    else
      return g * where((a == 0) & (b >= 0), y * 0, y * log(a));
  }
};
struct Neg {
  static constexpr auto name = "neg";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto x) const { return -x; }
  constexpr auto grad(auto g, auto, auto) const { return -g; }
};
struct Abs {
  static constexpr auto name = "abs";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto x) const { return abs(x); }
  constexpr auto grad(auto g, auto x, auto) const {
    return where(x > 0, g, where(x < 0, -g, g * 0));
  }
};
struct Maximum {
  static constexpr auto name = "maximum";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return where((a > b) | (a != a), a, b); }
  template <int I>
  constexpr auto grad(auto g, auto a, auto b, auto) const {
    if constexpr (I == 0)
      return where(a == b, g * 0.5, where(a < b, 0, g));
    else
      return where(a == b, g * 0.5, where(b < a, 0, g));
  }
};
struct Minimum {
  static constexpr auto name = "minimum";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return where((a < b) | (a != a), a, b); }
  template <int I>
  constexpr auto grad(auto g, auto a, auto b, auto) const {
    if constexpr (I == 0)
      return where(a == b, g * 0.5, where(a > b, 0, g));
    else
      return where(a == b, g * 0.5, where(b > a, 0, g));
  }
};
struct Clamp {
  static constexpr auto name = "clamp";
  static constexpr auto kinds = kNumbers;
  double min, max;
  constexpr auto value(auto x) const {
    auto low = where(x < min, min, x);
    return where(low > max, max, low);
  }
  // None at the bounds, as in PyTorch 2.15; an infinite one is no bound.
  constexpr auto grad(auto g, auto x, auto) const {
    constexpr double kNone = std::numeric_limits<double>::infinity();
    const auto above = min == -kNone ? x >= min : x > min,
               below = max == kNone ? x <= max : x < max;
    return where(above & below, g, 0);
  }
};
struct Where {
  static constexpr auto name = "where";
  static constexpr auto kinds = kNumbers;
  static constexpr int condition = 0;
  constexpr auto value(auto c, auto a, auto b) const { return where(c != 0, a, b); }
  template <int I>
  constexpr auto grad(auto g, auto c, auto, auto, auto) const {
    if constexpr (I == 1)
      return where(c != 0, g, 0);
    else
      return where(c != 0, 0, g);
  }
};
struct Less {
  static constexpr auto name = "lt";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a < b; }
};
struct Greater {
  static constexpr auto name = "gt";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a > b; }
};
struct LessEqual {
  static constexpr auto name = "le";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a <= b; }
};
struct GreaterEqual {
  static constexpr auto name = "ge";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a >= b; }
};
struct Equal {
  static constexpr auto name = "eq";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a == b; }
};
struct NotEqual {
  static constexpr auto name = "ne";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return a != b; }
};
struct And {
  static constexpr auto name = "logical_and";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return (a != 0) & (b != 0); }
};
struct Or {
  static constexpr auto name = "logical_or";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto a, auto b) const { return (a != 0) | (b != 0); }
};
using Arithmetic =
    List<Abs, Maximum, Minimum, Add, AddScaled, Sub, Mul, Div, Pow, Neg, Clamp, Where, Less,
         Greater, LessEqual, GreaterEqual, Equal, NotEqual, And, Or, Copy>;

}  // namespace sherd
