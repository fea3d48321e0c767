// Reductions. See core/reduce.h for how to read and extend this.
#pragma once
#include "core/reduce.h"

namespace sherd {

struct Sum {
  static constexpr auto name = "sum";
  static constexpr auto gives = kWide;
  static constexpr auto kinds = kNumbers;
  static constexpr bool empty = true;  // defined for no elements
  template <class V, class I>
  struct State {
    V sum{};
  };
  constexpr void add(auto& s, auto x, int) const { s.sum = s.sum + x; }
  constexpr void merge(auto& s, auto o, double, double) const { s.sum = s.sum + o.sum; }
  constexpr auto result(auto s, double) const { return s.sum; }
  auto grad(auto g, auto, auto, const Over&) const { return g; }
};
struct Mean : Sum {
  static constexpr auto name = "mean";
  static constexpr auto kinds = kFloats;
  constexpr auto result(auto s, double n) const { return s.sum / n; }
  auto grad(auto g, auto, auto, const Over& o) const { return g / double(o.count); }
};
struct Norm {  // the 2-norm
  static constexpr auto name = "norm";
  static constexpr bool empty = true;
  template <class V, class I>
  struct State {
    V squares{};
  };
  constexpr void add(auto& s, auto x, int) const { s.squares = s.squares + x * x; }
  constexpr void merge(auto& s, auto o, double, double) const { s.squares = s.squares + o.squares; }
  constexpr auto result(auto s, double) const { return sqrt(s.squares); }
  auto grad(auto g, auto x, auto y, const Over&) const { return where(y == 0, 0, g * x / y); }
};
struct Amax {
  static constexpr auto name = "amax";
  static constexpr auto kinds = kNumbers;
  template <class V, class I>
  struct State {
    V best = lowest<V>();
  };
  constexpr void add(auto& s, auto x, int) const {
    s.best = where((x > s.best) | (x != x), x, s.best);
  }
  constexpr void merge(auto& s, auto o, double, double) const { add(s, o.best, 0); }
  constexpr auto result(auto s, double) const { return s.best; }
  auto grad(auto g, auto x, auto y, const Over& o) const {
    auto hit = (x == y).to(g.dtype());
    return g * hit / sum(hit, o.dims, true);
  }
};
struct Argmax {
  static constexpr auto name = "argmax";
  static constexpr auto gives = kIndex;
  static constexpr auto kinds = kNumbers;
  template <class V, class I>
  struct State {
    V best = lowest<V>();
    I at{};
  };
  constexpr void add(auto& s, auto x, int step) const {
    auto better = (x > s.best) | ((x != x) & (s.best == s.best));
    s.best = where(better, x, s.best), s.at = where(better, step, s.at);
  }
  constexpr void place(auto& s, auto first, int stride) const {
    s.at = s.at * stride + first;
  }  // from steps to positions
  constexpr void merge(auto& s, auto o, double, double) const {
    auto better =
        (o.best > s.best) | ((o.best != o.best) & (s.best == s.best)) |
        ((o.at < s.at) & ((o.best == s.best) | ((o.best != o.best) & (s.best != s.best))));
    s.best = where(better, o.best, s.best), s.at = where(better, o.at, s.at);
  }
  constexpr auto result(auto s, double) const { return s.at; }
};
struct Var {
  static constexpr auto name = "var";
  static constexpr bool empty = true;
  static constexpr bool in_float64 = true;  // a mean in float32 would hide a small variance
  double correction;
  template <class V, class I>
  struct State {
    V mean{}, squares{};
  };
  constexpr void add(auto& s, auto x, int step) const {
    auto d = x - s.mean;
    s.mean = s.mean + d / (step + 1), s.squares = s.squares + d * (x - s.mean);
  }
  constexpr void merge(auto& s, auto o, double n, double m) const {
    auto d = o.mean - s.mean;
    s.mean = s.mean + d * (m / (n + m)),
    s.squares = s.squares + o.squares + d * d * (n * m / (n + m));
  }
  constexpr auto result(auto s, double n) const {
    return s.squares / (n > correction ? n - correction : 0);
  }
  auto grad(auto g, auto x, auto, const Over& o) const {
    return g * (2 / std::max(0., double(o.count) - correction)) * (x - mean(x, o.dims, true));
  }
};
using Reductions = List<Sum, Mean, Norm, Amax, Argmax, Var>;

}  // namespace sherd
