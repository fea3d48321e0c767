// Elementary functions and activations. See pointwise.h for how to read and extend this.
#pragma once
#include "core/pointwise.h"

namespace sherd {

struct Exp {
  static constexpr auto name = "exp";
  constexpr auto value(auto x) const { return exp(x); }
  constexpr auto grad(auto g, auto, auto y) const { return g * y; }
};
struct Log {
  static constexpr auto name = "log";
  constexpr auto value(auto x) const { return log(x); }
  constexpr auto grad(auto g, auto x, auto) const { return g / x; }
};
struct Sqrt {
  static constexpr auto name = "sqrt";
  constexpr auto value(auto x) const { return sqrt(x); }
  constexpr auto grad(auto g, auto, auto y) const { return g / (2 * y); }
};
struct Tanh {
  static constexpr auto name = "tanh";
  constexpr auto value(auto x) const { return tanh(x); }
  constexpr auto grad(auto g, auto, auto y) const { return g * (1 - y * y); }
};
struct Erf {
  static constexpr auto name = "erf";
  constexpr auto value(auto x) const { return erf(x); }
  constexpr auto grad(auto g, auto x, auto) const {
    return g * (1.1283791670955126 * exp(-(x * x)));
  }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid";
  constexpr auto value(auto x) const { return sigmoid(x); }
  constexpr auto grad(auto g, auto, auto y) const { return g * y * (1 - y); }
};
struct Relu {
  static constexpr auto name = "relu";
  static constexpr auto kinds = kNumbers;
  constexpr auto value(auto x) const { return where(x <= 0, 0, x); }
  constexpr auto grad(auto g, auto, auto y) const { return where(y <= 0, 0, g); }
};
struct LeakyRelu {
  static constexpr auto name = "leaky_relu";
  double slope;
  constexpr auto value(auto x) const { return where(x > 0, x, x * slope); }
  constexpr auto grad(auto g, auto x, auto) const { return where(x > 0, g, g * slope); }
};
struct Silu {
  static constexpr auto name = "silu";
  constexpr auto value(auto x) const { return x * sigmoid(x); }
  constexpr auto grad(auto g, auto x, auto) const {
    auto s = sigmoid(x);
    return g * s * (1 + x * (1 - s));
  }
};
struct Gelu {  // x Phi(x)
  static constexpr auto name = "gelu";
  constexpr auto value(auto x) const { return 0.5 * x * (1 + erf(x * 0.7071067811865476)); }
  constexpr auto grad(auto g, auto x, auto) const {
    return g *
           (0.5 * (1 + erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * exp(-0.5 * (x * x)));
  }
};
struct GeluTanh {  // with Phi(x) by tanh
  static constexpr auto name = "gelu_tanh";
  static constexpr auto inner(auto x) { return 0.7978845608028654 * (x + 0.044715 * (x * x * x)); }
  constexpr auto value(auto x) const { return 0.5 * x * (1 + tanh(inner(x))); }
  constexpr auto grad(auto g, auto x, auto) const {
    auto t = tanh(inner(x));
    return g * (0.5 * (1 + t) +
                0.5 * x * (1 - t * t) * (0.7978845608028654 * (1 + 0.134145 * (x * x))));
  }
};
using Activations = List<Exp, Log, Sqrt, Tanh, Erf, Sigmoid, Relu, LeakyRelu, Silu, Gelu, GeluTanh>;

}  // namespace sherd
