// Rows of the pointwise ops.
#include <cmath>

#include "autograd/pointwise.h"
#include "core/ops/activation.h"
#include "core/ops/arithmetic.h"
#include "tests/autograd/op_table.h"

namespace sherd::test {
namespace {

constexpr double kInf = INFINITY, kNan = NAN;
const std::vector<double> kSpecial{kNan, kInf, -kInf, 0.0,  -0.0, 1e-30, -1e-30, 0.5,  -0.5,
                                   1.0,  -1.0, 2.0,   -2.0, 3.5,  10.5,  -10.5,  1e30, -1e30};
// Where the derivative of a function of one variable is looked at.
struct Range {
  double low = -3, high = 3;
};

// `f` is the public function, `op` its struct, `value` the same for numbers.
template <class Op, class F, class V>
Row unary(std::string name, const Op& op, F f, V value, Range range = {},
          Row::Integers integers = Row::kBecomeFloat) {
  Row r;
  r.name = std::move(name);
  r.f = [f](const Inputs& t) { return f(t[0]); };
  r.reference = [value](const Inputs& t) {
    return build(t[0].sizes(), [&](const Dims& i) { return double(value(at(t[0], i))); });
  };
  for (Dims s : {Dims{2, 3}, Dims{}, Dims{1}, Dims{0}, Dims{0, 3}, Dims{7}, Dims{2, 3, 5},
                 Dims{2, 1, 300}, Dims{1025}})
    r.samples.push_back({In(s, range.low, range.high)});
  r.large = {In({3, 33000}, range.low, range.high)};
  r.exact = true;
  r.integers = integers;
  r.special = kSpecial;
  r.differentiable = differentiable<Op>;
  if constexpr (!gives_bool<Op>) {
    r.in_place = [op](Tensor& x, const Inputs&) { call_(op, x); };
    r.out = [op](Tensor& y, const Inputs& in) { call_out(op, y, in[0]); };
  }
  return r;
}

template <class Op, class F, class V>
Row binary(std::string name, const Op& op, F f, V value, Range range = {},
           Row::Integers integers = Row::kStay) {
  Row r;
  r.name = std::move(name);
  r.f = [f](const Inputs& t) { return f(t[0], t[1]); };
  r.reference = [value, n = r.name](const Inputs& t) {
    return build(broadcast(t[0].sizes(), t[1].sizes(), n.c_str()), [&](const Dims& i) {
      return double(value(broadcast_at(t[0], i), broadcast_at(t[1], i)));
    });
  };
  const std::pair<Dims, Dims> shapes[] = {
      {{2, 3}, {2, 3}},         {{}, {}},         {{3}, {}},        {{}, {2, 2}},
      {{4, 1, 3}, {5, 1}},      {{0, 3}, {3}},    {{1, 0}, {4, 1}}, {{2, 3, 4}, {3, 1}},
      {{2, 1, 300}, {2, 2, 1}}, {{1025}, {1025}}, {{3, 400}, {400}}};
  for (auto& [a, b] : shapes)
    r.samples.push_back({In(a, range.low, range.high), In(b, range.low, range.high)});
  r.large = {In({50, 3, 333}, range.low, range.high), In({3, 333}, range.low, range.high)};
  r.exact = true;
  r.integers = integers;
  r.special = kSpecial;
  r.differentiable = differentiable<Op>;
  // The gradient of a broadcast input is a sum, whose order follows the layout.
  r.exact = !r.differentiable;
  if constexpr (!gives_bool<Op>) {
    r.in_place = [op](Tensor& x, const Inputs& o) { call_(op, x, o[0]); };
    r.out = [op](Tensor& y, const Inputs& in) { call_out(op, y, in[0], in[1]); };
  }
  r.refused = {[f] { f(full({3}, 1), full({4}, 1)); },
               [f] {
                 f(full({2, 3}, 1), full({2}, 1));
               },
               [f] { f(full({3}, 1), empty({3}, kFloat32, kMeta)); }};
  return r;
}

template <class Op, class F, class V>
Row comparison(std::string name, const Op& op, F f, V value) {
  return binary(std::move(name), op, f, value, {}, Row::kToBool);
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x * std::sqrt(0.5)); }
double logistic(double x) { return 1 / (1 + std::exp(-x)); }
double max_of(double a, double b) { return a != a || a > b ? a : b; }
double min_of(double a, double b) { return a != a || a < b ? a : b; }
using T = const Tensor&;

}  // namespace

std::vector<Row> pointwise_rows() {
  std::vector<Row> rows{
      binary(
          "add", Add{}, [](T a, T b) { return a + b; }, [](double a, double b) { return a + b; }),
      binary(
          "add_scaled", AddScaled{2}, [](T a, T b) { return add(a, b, 2); },
          [](double a, double b) { return a + 2 * b; }),
      binary(
          "sub", Sub{}, [](T a, T b) { return a - b; }, [](double a, double b) { return a - b; }),
      binary(
          "mul", Mul{}, [](T a, T b) { return a * b; }, [](double a, double b) { return a * b; }),
      binary(
          "div", Div{}, [](T a, T b) { return a / b; }, [](double a, double b) { return a / b; },
          {0.5, 3}, Row::kBecomeFloat),
      binary(
          "pow", Pow{}, [](T a, T b) { return pow(a, b); },
          [](double a, double b) { return std::pow(a, b); }, {0.5, 2}),
      binary("maximum", Maximum{}, maximum, max_of),
      binary("minimum", Minimum{}, minimum, min_of),
      comparison(
          "lt", Less{}, [](T a, T b) { return a < b; }, std::less<>()),
      comparison(
          "gt", Greater{}, [](T a, T b) { return a > b; }, std::greater<>()),
      comparison(
          "le", LessEqual{}, [](T a, T b) { return a <= b; }, std::less_equal<>()),
      comparison(
          "ge", GreaterEqual{}, [](T a, T b) { return a >= b; }, std::greater_equal<>()),
      comparison(
          "eq", Equal{}, [](T a, T b) { return a == b; }, std::equal_to<>()),
      comparison(
          "ne", NotEqual{}, [](T a, T b) { return a != b; }, std::not_equal_to<>()),
      comparison(
          "logical_and", And{}, [](T a, T b) { return a & b; },
          [](double a, double b) { return a != 0 && b != 0; }),
      comparison(
          "logical_or", Or{}, [](T a, T b) { return a | b; },
          [](double a, double b) { return a != 0 || b != 0; }),
      unary("neg", Neg{}, neg, std::negate<>(), {}, Row::kStay),
      unary(
          "abs", Abs{}, [](T x) { return abs(x); }, [](double x) { return std::abs(x); }, {0.1, 3},
          Row::kStay),
      unary(
          "clamp", Clamp{-1, 2}, [](T x) { return clamp(x, -1, 2); },
          [](double x) { return x < -1  ? -1
                                : x > 2 ? 2
                                        : x; }, {}, Row::kStay),
      unary(
          "exp", Exp{}, [](T x) { return exp(x); }, [](double x) { return std::exp(x); }),
      unary(
          "log", Log{}, [](T x) { return log(x); }, [](double x) { return std::log(x); }, {0.1, 4}),
      unary(
          "sqrt", Sqrt{}, [](T x) { return sqrt(x); }, [](double x) { return std::sqrt(x); },
          {0.1, 4}),
      unary(
          "tanh", Tanh{}, [](T x) { return tanh(x); }, [](double x) { return std::tanh(x); }),
      unary(
          "erf", Erf{}, [](T x) { return erf(x); }, [](double x) { return std::erf(x); }),
      unary(
          "sigmoid", Sigmoid{}, [](T x) { return sigmoid(x); }, logistic),
      unary(
          "relu", Relu{}, relu, [](double x) { return x <= 0 ? 0 : x; }, {}, Row::kStay),
      unary(
          "leaky_relu", LeakyRelu{0.1}, [](T x) { return leaky_relu(x, 0.1); },
          [](double x) { return x > 0 ? x : 0.1 * x; }),
      unary("silu", Silu{}, silu, [](double x) { return x * logistic(x); }),
      unary(
          "gelu", Gelu{}, [](T x) { return gelu(x); }, [](double x) { return x * normal_cdf(x); }),
      unary(
          "gelu_tanh", GeluTanh{}, [](T x) { return gelu(x, "tanh"); },
          [](double x) {
            return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
          }),
      unary(
          "to", Copy{}, [](T x) { return x.to(kFloat64).to(x.dtype()); },
          [](double x) { return x; }, {}, Row::kStay),
      unary(
          "clone", Copy{}, [](T x) { return x.clone(); }, [](double x) { return x; }, {},
          Row::kStay),
  };
  for (auto& r : rows)
    if (r.name == "gelu" || r.name == "gelu_tanh")
      r.refused = {[] { gelu(full({1}, 1), "exact"); }};

  Row choose;
  choose.name = "where";
  choose.f = [](const Inputs& t) { return where(t[0], t[1], t[2]); };
  choose.reference = [](const Inputs& t) {
    const Dims s = broadcast(broadcast(t[0].sizes(), t[1].sizes(), "where"), t[2].sizes(), "where");
    return build(s, [&](const Dims& i) {
      return broadcast_at(t[0], i) ? broadcast_at(t[1], i) : broadcast_at(t[2], i);
    });
  };
  choose.samples = {{In::truth({2, 3}), {2, 3}, {2, 3}},
                    {In::truth({}), {}, {}},
                    {In::truth({4, 1}), {3}, {2, 1, 3}},
                    {In::truth({0}), {1}, {}},
                    {In::truth({700}), {700}, {700}}};
  choose.large = {In::truth({3, 33000}), {3, 33000}, {33000}};
  choose.integers = Row::kStay;
  choose.special = kSpecial;
  choose.refused = {[] { where(full({3}, 1, kBool), full({4}, 1), full({3}, 1)); }};
  rows.push_back(choose);

  Row fill;
  fill.name = "masked_fill";
  fill.f = [](const Inputs& t) { return masked_fill(t[0], t[1], 7); };
  fill.reference = [](const Inputs& t) {
    return build(t[0].sizes(),
                 [&](const Dims& i) { return broadcast_at(t[1], i) ? 7 : at(t[0], i); });
  };
  fill.samples = {{{2, 3}, In::truth({2, 3})},
                  {{}, In::truth({})},
                  {{2, 3, 4}, In::truth({3, 1})},
                  {{0, 2}, In::truth({2})}};
  fill.large = {{3, 33000}, In::truth({33000})};
  fill.integers = Row::kStay;
  fill.refused = {[] { masked_fill(full({3}, 1), full({3}, 1), 0); }};
  rows.push_back(fill);
  return rows;
}

}  // namespace sherd::test
