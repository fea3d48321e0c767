// Every test of every row of the table. The names of the cases are Ops/OpTable.<test>/<op>.
#include "tests/autograd/op_table.h"

#include "autograd/engine.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "tests/core/support.h"

namespace sherd::test {

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

namespace {

constexpr DType kRealTypes[] = {kFloat64, kFloat32, kBFloat16, kFloat16};
constexpr int64_t kDifferentiated =
    130;  // elements of a sample that gradcheck takes in reasonable time

// Rounding of a few operations, relative to 1 + |value|.
double allowed(DType d) {
  return d == kFloat64 ? 1e-12 : d == kFloat32 ? 3e-6 : d == kFloat16 ? 4e-3 : 3e-2;
}

// The largest |a - b| / (1 + |b|); infinite where shapes, NaNs or infinities differ.
double distance(const Tensor& a, const Tensor& b) {
  if (!(a.sizes() == b.sizes())) return INFINITY;
  const auto x = values(a.detach()), y = values(b.detach());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
    const double e = std::abs(x[i] - y[i]) / (1 + std::abs(y[i]));
    worst = std::isnan(e) ? INFINITY : std::max(worst, e);
  }
  return worst;
}

template <class F>
Inputs mapped(const Inputs& in, F f) {
  Inputs out;
  for (auto& t : in) out.push_back(t.defined() ? f(t) : t);
  return out;
}

// ---- the same values in other layouts
Tensor transposed(const Tensor& t) {  // dimensions in reverse order in memory
  Dims reversed;
  for (int i = t.dim() - 1; i >= 0; --i) reversed.push(t.size(i));
  const Tensor memory = empty(reversed, t.dtype());
  Dims strides = memory.strides();
  std::reverse(strides.d, strides.d + strides.n);
  const Tensor y = memory.as_strided_raw(t.sizes(), strides, 0);
  copy_raw(y, t);
  return y;
}
Tensor stepped(const Tensor& t) {  // every second element of a larger tensor
  const Tensor memory = full(joined(t.sizes(), {2}), 1, t.dtype());
  const Tensor y = memory.as_strided_raw(t.sizes(), head(memory.strides(), t.dim()), 0);
  copy_raw(y, t);
  return y;
}
// The first slice of dimension `d` for all: stride 0; and as a dense tensor.
std::pair<Tensor, Tensor> expanded(const Tensor& t, int d) {
  if (t.dim() <= d || t.size(d) == 0) return {t, t};
  const Tensor y = t.as_strided_raw(t.sizes(), with(t.strides(), d, 0), t.storage_offset());
  return {y, contiguous_raw(y)};
}

// ---- inputs of other dtypes
Inputs real(const Inputs& in, DType d) {
  return mapped(in, [d](const Tensor& t) { return is_float(t.dtype()) ? to_raw(t, d) : t; });
}

struct Derivatives {
  Tensor y;
  std::vector<Tensor> gradients;  // of the inputs that are floating point
};
// y, and the gradients of the sum of y weighted by fixed numbers. `of` keeps its layout.
Derivatives derive(const Row& row, const Inputs& of, bool create_graph = false) {
  Inputs in = mapped(of, [](const Tensor& t) {
    const Tensor leaf = t.detach();
    return is_float(t.dtype()) ? leaf.set_requires_grad() : leaf;
  });
  Derivatives r{row.f(in), {}};
  if (!r.y.requires_grad()) return r;
  std::vector<Tensor> leaves;
  for (auto& t : in)
    if (t.defined() && t.requires_grad()) leaves.push_back(t);
  const Tensor weights = random_tensor(r.y.sizes(), 99, r.y.dtype(), 0.5, 1.5);
  r.gradients =
      grad({r.y}, leaves, {weights}, {.create_graph = create_graph, .allow_unused = true});
  return r;
}

void expect_near(const Derivatives& got, const Derivatives& want, double tolerance,
                 const std::string& what) {
  EXPECT_LE(distance(got.y, want.y), tolerance) << what;
  ASSERT_EQ(got.gradients.size(), want.gradients.size()) << what;
  for (size_t k = 0; k < got.gradients.size(); ++k) {
    ASSERT_EQ(got.gradients[k].defined(), want.gradients[k].defined()) << what;
    if (got.gradients[k].defined()) {
      EXPECT_LE(distance(got.gradients[k], want.gradients[k]), 4 * tolerance)
          << what << ", gradient " << k;
    }
  }
}
std::vector<Tensor> all_of(const Derivatives& d) {
  std::vector<Tensor> r{contiguous_raw(d.y.detach())};
  for (auto& g : d.gradients)
    if (g.defined()) r.push_back(contiguous_raw(g.detach()));
  return r;
}

class OpTable : public testing::TestWithParam<Row> {
 protected:
  const Row& row = GetParam();
  Inputs large() const { return draw(row.large.empty() ? row.samples.back() : row.large, 7); }
  // Each sample, small enough to be differentiated.
  template <class F>
  void for_small(F f) const {
    for (size_t s = 0; s < row.samples.size(); ++s) {
      int64_t n = 0;
      for (auto& in : row.samples[s]) n += in.kind == In::kReal ? in.sizes.numel() : 0;
      if (n > kDifferentiated) continue;
      SCOPED_TRACE(concat("sample ", s, " ", row.samples[s][0].sizes));
      f(draw(row.samples[s], 10 * s));
    }
  }
  double tolerance(DType d) const { return allowed(d) * row.tolerance; }
};

TEST_P(OpTable, Forward) {
  for (size_t s = 0; s < row.samples.size(); ++s) {
    SCOPED_TRACE(concat("sample ", s, " ", row.samples[s][0].sizes));
    const Inputs in = draw(row.samples[s], 10 * s);
    const Tensor y = row.f(in), want = row.reference(in);
    EXPECT_EQ(y.sizes(), want.sizes())
        << to_string(y.sizes()) << ", expected " << to_string(want.sizes());
    EXPECT_LE(distance(y, want), tolerance(kFloat64));
    EXPECT_FALSE(y.requires_grad());
    if (row.is_view) {
      EXPECT_EQ(y.storage().get(), in[0].storage().get());
    }
  }
}

TEST_P(OpTable, Gradients) {
  const TensorsFunction f = [this](const Inputs& in) { return Inputs{row.f(in)}; };
  for_small([&](const Inputs& in) {
    if (!row.differentiable) {
      EXPECT_FALSE(derive(row, in).y.requires_grad());
      return;
    }
    if (row.differentiates_constants) return;
    EXPECT_NO_THROW(gradcheck(f, in));
    EXPECT_NO_THROW(gradcheck(f, in, {.create_graph = true})) << "composed";
    if (row.twice) {
      EXPECT_NO_THROW(gradgradcheck(f, in)) << "second derivative";
    }
    // The fused and the composed derivative are one function.
    expect_near(derive(row, in), derive(row, in, true), tolerance(kFloat64), "fused and composed");
  });
}

TEST_P(OpTable, Layouts) {
  for (size_t s = 0; s < row.samples.size(); ++s) {
    SCOPED_TRACE(concat("sample ", s, " ", row.samples[s][0].sizes));
    const Inputs in = draw(row.samples[s], 10 * s);
    const Derivatives want = derive(row, in);
    const double near = row.exact ? 0 : tolerance(kFloat64);
    expect_near(derive(row, mapped(in, transposed)), want, near, "transposed");
    expect_near(derive(row, mapped(in, stepped)), want, near, "stepped");
    for (size_t k = 0; k < in.size(); ++k) {  // one at a time
      if (!in[k].defined()) continue;
      Inputs one = in;
      one[k] = transposed(in[k]);
      expect_near(derive(row, one), want, near, concat("transposed input ", k));
    }
    for (int d : {0, 1}) {
      Inputs strided, dense;
      for (auto& t : in) {
        auto [a, b] = t.defined() ? expanded(t, d) : std::pair(t, t);
        strided.push_back(a), dense.push_back(b);
      }
      expect_near(derive(row, strided), derive(row, dense), near, concat("expanded along ", d));
    }
    NoGrad off;
    EXPECT_LE(distance(row.f(in), want.y), row.library ? near : 0) << "under no_grad";
  }
}

TEST_P(OpTable, DTypes) {
  for (size_t s = 0; s < row.samples.size(); ++s) {
    SCOPED_TRACE(concat("sample ", s, " ", row.samples[s][0].sizes));
    const Inputs in = draw(row.samples[s], 10 * s);
    const DType exact_type = row.f(in).dtype();
    for (DType d : kRealTypes) {
      const Inputs low = real(in, d), wide = real(low, kFloat64);
      const Derivatives got = derive(row, low);
      EXPECT_EQ(got.y.dtype(), is_float(exact_type) ? d : exact_type) << name_of(d);
      expect_near(got, derive(row, wide), tolerance(d), name_of(d));
      for (size_t k = 0; k < got.gradients.size(); ++k)
        if (got.gradients[k].defined()) {
          EXPECT_EQ(got.gradients[k].dtype(), d) << name_of(d);
        }
    }
  }
}

// Small whole numbers in each integer type.
TEST_P(OpTable, Integers) {
  const Inputs drawn = draw(row.samples.front(), 3);
  for (DType d : {kInt64, kInt32, kUInt8, kBool}) {
    const Inputs in = mapped(drawn, [d](const Tensor& t) {
      if (t.dtype() != kFloat64) return t;
      const Tensor whole = random_tensor(t.sizes(), 5, kFloat64, 1, d == kBool ? 2 : 4);
      return to_raw(to_raw(whole, kInt64), d);
    });
    if (row.integers == Row::kRefused) {
      EXPECT_THROW(row.f(in), Error) << name_of(d);
      continue;
    }
    Tensor y;
    try {
      y = row.f(in);
    } catch (const Error& e) {
      // No negative or difference of truth values, and no product of bytes.
      EXPECT_TRUE(d == kBool || (d == kUInt8 && row.library)) << e.what();
      continue;
    }
    const DType want = row.integers == Row::kBecomeFloat   ? kFloat32
                       : row.integers == Row::kStay        ? d
                       : row.integers == Row::kTimesNumber ? (d == kBool ? kInt64 : d)
                       : row.integers == Row::kToBool      ? kBool
                                                           : kInt64;
    EXPECT_EQ(y.dtype(), want) << name_of(d);
    if (d == kBool ||
        (d == kUInt8 && (row.integers == Row::kStay || row.integers == Row::kTimesNumber)))
      continue;  // wrap around
    Inputs as_reals;
    for (size_t k = 0; k < in.size(); ++k)
      as_reals.push_back(drawn[k].defined() && is_float(drawn[k].dtype()) ? to_raw(in[k], kFloat64)
                                                                          : in[k]);
    EXPECT_LE(distance(y, row.f(as_reals)),
              row.integers == Row::kBecomeFloat ? tolerance(kFloat32) : 0)
        << name_of(d);
  }
}

// The bits follow from the values alone: not from the number of threads, the instruction set, or
// the place in memory.
TEST_P(OpTable, SameBits) {
  for (DType d : {kFloat32, kBFloat16, kFloat64}) {
    const Inputs in = real(large(), d);
    if (!row.library)
      expect_same_bits_everywhere([&] { return all_of(derive(row, in)); }, name_of(d));
    const auto here = all_of(derive(row, in)), there = all_of(derive(row, mapped(in, shifted)));
    ASSERT_EQ(here.size(), there.size());
    for (size_t k = 0; k < here.size(); ++k)
      EXPECT_TRUE(same_bits(here[k], there[k]))
          << name_of(d) << " one element further, result " << k;
  }
}

TEST_P(OpTable, Meta) {
  for (size_t s = 0; s < row.samples.size(); ++s) {
    SCOPED_TRACE(concat("sample ", s, " ", row.samples[s][0].sizes));
    const Inputs in = draw(row.samples[s], 10 * s);
    const Inputs shapes =
        mapped(in, [](const Tensor& t) { return empty(t.sizes(), t.dtype(), kMeta); });
    const Derivatives y = derive(row, in);
    const Tensor m = row.f(shapes);
    EXPECT_TRUE(m.device().is_meta());
    EXPECT_EQ(m.sizes(), y.y.sizes());
    EXPECT_EQ(m.dtype(), y.y.dtype());
    if (!y.y.requires_grad()) continue;
    Inputs leaves = mapped(
        shapes, [](const Tensor& t) { return is_float(t.dtype()) ? t.set_requires_grad() : t; });
    const Tensor z = row.f(leaves);
    ASSERT_TRUE(z.requires_grad());
    z.backward(empty(z.sizes(), z.dtype(), kMeta));
    for (auto& t : leaves)
      if (t.defined() && t.requires_grad() && t.grad().defined()) {
        EXPECT_EQ(t.grad().sizes(), t.sizes());
        EXPECT_TRUE(t.grad().device().is_meta());
      }
  }
}

TEST_P(OpTable, SpecialValues) {
  if (!row.special.empty()) {  // pointwise: every combination
    const int64_t n = int64_t(row.special.size());
    const size_t arity = row.samples[0].size();
    for (DType d : {kFloat64, kFloat32, kBFloat16}) {
      Inputs in;
      for (size_t k = 0; k < arity; ++k) {
        if (row.samples[0][k].kind == In::kTruth) {
          in.push_back(In::truth(Dims{}).draw(0));
          continue;
        }
        Dims sizes;
        for (size_t j = 0; j < arity; ++j) sizes.push(j == k ? n : 1);
        in.push_back(from_values(row.special, sizes, d));
      }
      const Inputs wide = real(in, kFloat64);
      const Inputs exact =
          mapped(in, [](const Tensor& t) { return is_float(t.dtype()) ? to_raw(t, kFloat64) : t; });
      const Tensor y = row.f(in);
      // The true value, rounded to the result's dtype.
      const Tensor want = to_raw(row.reference(exact), is_float(y.dtype()) ? d : kFloat64);
      const auto a = values(y), b = values(want);
      for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
        const double e = std::abs(a[i] - b[i]);
        // Near 0 and near the ends of the range: a few units in the last place, of subnormal
        // numbers too.
        const double unit = d == kFloat64 ? 0x1p-52 : d == kFloat32 ? 0x1p-23 : 0x1p-7;
        EXPECT_LE(e, (d == kFloat64 ? 1e3 : 20) * unit * std::abs(b[i]) +
                         (d == kFloat64 ? 1e-15 : 2e-7) * std::min(1.0, 1e30 * std::abs(b[i])))
            << name_of(d) << ", combination " << i << ": " << a[i] << ", expected " << b[i];
      }
    }
  }
  if (row.special.empty() && row.samples[0][0].kind == In::kReal &&
      row.samples[0][0].sizes.numel() > 1) {
    for (DType d : kRealTypes)
      for (double bad : row.bad) {
        Inputs in = real(draw(row.samples[0], 0), d);
        copy_raw(in[0].as_strided_raw({}, {}, in[0].storage_offset()), Tensor(bad));
        const Inputs wide = real(in, kFloat64);
        const Tensor y = row.f(in), want = row.reference(wide);
        if (is_float(y.dtype())) {
          EXPECT_LE(distance(y, want), tolerance(d)) << name_of(d) << " with " << bad;
        } else {
          EXPECT_EQ(values(y), values(want)) << name_of(d) << " with " << bad;
        }
      }
  }
}

TEST(Pointwise, WholeNumbersAreNotRounded) {
  const int64_t big = (int64_t(1) << 53) + 1;
  const Tensor x = tensor<int64_t>({big, -3, INT64_MAX});
  const auto ints = [](const Tensor& t) {
    return std::vector<int64_t>(t.data<int64_t>(), t.data<int64_t>() + t.numel());
  };
  using Ints = std::vector<int64_t>;
  const Tensor none = zeros({3}, kBool);
  EXPECT_EQ(ints(masked_fill(x, none, 7)), (Ints{big, -3, INT64_MAX}));
  EXPECT_EQ(ints(masked_fill(x, x > 0, -1)), (Ints{-1, -3, -1}));
  EXPECT_THROW(masked_fill(x, none, NAN), Error);
  EXPECT_THROW(masked_fill(tensor<int32_t>({1}), zeros({1}, kBool), 1e10), Error);
  EXPECT_EQ(full({1}, 255, kInt32).item<uint8_t>(), 255);
  EXPECT_THROW(full({1}, 300, kInt32).item<uint8_t>(), Error);
  EXPECT_THROW(full({1}, -1, kInt32).item<uint64_t>(), Error);
  EXPECT_EQ(full({1}, -2.5).item<int>(), -2);
  EXPECT_THROW(full({1}, 1e10).item<int>(), Error);
  EXPECT_THROW(full({1}, NAN).item<int64_t>(), Error);
  EXPECT_EQ(x.narrow(0, 2, 1).item<int64_t>(), INT64_MAX);
  // torch.full's and fill_'s answers.
  EXPECT_EQ(ints(full({1}, 2.5, kInt64)), Ints{2});
  EXPECT_EQ(values(full({1}, -1, kUInt8)), std::vector<double>{255});
  EXPECT_EQ(values(full({1}, 255.5, kUInt8)), std::vector<double>{255});
  EXPECT_EQ(values(full({1}, 2147483647.5, kInt32)), std::vector<double>{2147483647});
  EXPECT_EQ(values(full({1}, 1e30, kBool)), std::vector<double>{1});
  EXPECT_EQ(values(full({1}, INFINITY)), std::vector<double>{INFINITY});
  const std::vector<std::pair<double, DType>> no_room = {
      {300, kUInt8},      {-300, kUInt8},          {-1.5, kUInt8},
      {NAN, kInt64},      {1e30, kInt64},          {0x1p63, kInt64},
      {INFINITY, kInt32}, {-2147483648.5, kInt32}, {1e39, kFloat32}};
  for (auto& [value, dtype] : no_room) {
    EXPECT_THROW(full({1}, value, dtype), Error) << value << " " << name_of(dtype);
    Tensor t = zeros({1}, dtype);
    EXPECT_THROW(t.fill_(value), Error) << value << " " << name_of(dtype);
  }
  EXPECT_EQ(values(pow(tensor<int32_t>({3, -2}), tensor<int32_t>({20, 31}))),
            (std::vector<double>{3486784401.0 - 4294967296.0, -2147483648.0}));
  EXPECT_EQ(ints(clamp(x, 0, INFINITY)), (Ints{big, 0, INT64_MAX}));
  EXPECT_EQ(ints(clamp(x, -INFINITY, 5)), (Ints{5, -3, 5}));
  EXPECT_EQ(clamp(tensor<int32_t>({-7, 9}), 0, 1e10).dtype(), kInt32);
  EXPECT_EQ(values(clamp(tensor<int32_t>({-7, 9}), 0, 1e10)), (std::vector<double>{0, 9}));
  for (DType dtype : {kInt64, kBFloat16}) {
    const Tensor nan = clamp(ones({2}, dtype), 0, NAN);
    EXPECT_EQ(nan.dtype(), dtype == kInt64 ? kFloat32 : dtype);
    for (double v : values(nan)) EXPECT_TRUE(std::isnan(v));
  }
  EXPECT_EQ(values(clamp(tensor<int64_t>({0, 2, 9}), 0.5, 2.5)),
            (std::vector<double>{0.5, 2, 2.5}));
  EXPECT_EQ(ints(pow(tensor<int64_t>({94906267, 3, -2, -1, 5, 0}),
                     tensor<int64_t>({2, 39, 3, -3, -1, 0}))),
            (Ints{9007199515875289, 4052555153018976267, -8, -1, 0, 1}));
  EXPECT_TRUE(tensor<double>({0.5}).item<bool>());
}

TEST(Losses, FloatingPointTargetsAreProbabilities) {
  try {
    cross_entropy(zeros({4, 3}), zeros({4}));
    ADD_FAILURE() << "no Error was thrown";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("class indices are int64"), std::string::npos) << e.what();
  }
}

TEST(Losses, ABroadcastIsWarnedOfOnce) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) mse_loss(ones({3, 1}), ones({3}));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text,
            "[mse_loss] warning: input [3, 1] and target [3] differ in shape and are broadcast, "
            "which is seldom meant\n");
}

TEST(Views, SizesBeyondTheTensorAreErrors) {
  const Tensor x = ones({4});
  const int64_t half = int64_t(1) << 62;
  EXPECT_THROW(x.narrow(0, INT64_MAX, 1), Error);
  EXPECT_THROW(x.narrow(0, half, half), Error);
  EXPECT_THROW(x.narrow(0, 3, 2), Error);
  EXPECT_THROW(x.view({half + 1, 4}), Error);
  EXPECT_THROW(zeros({0}).view({half, 4}), Error);
  EXPECT_THROW(ones({1}).expand({half, 8}), Error);
  EXPECT_EQ(zeros({0}).view({half, 4, 0}).numel(), 0);
  EXPECT_EQ(x.narrow(0, 4, 0).numel(), 0);
}

// PyTorch's: what is neither below nor above has the whole gradient.
TEST(Pointwise, GradientsAtNaNAndAtBounds) {
  const auto gradient = [](const auto& f, double value) {
    Tensor x = tensor<double>({value, value, value, value, value}).set_requires_grad();
    f(x).backward(tensor<double>({1, 2, 3, 4, 5}));
    return values(x.grad());
  };
  const std::vector<double> all = {1, 2, 3, 4, 5};
  const Tensor other = full({5}, 0.5, kFloat64);
  EXPECT_EQ(gradient([](const Tensor& x) { return relu(x); }, NAN), all);
  const std::vector<double> none(5);
  for (double value : {0.0, 2.0, 5.0, double(NAN)})
    EXPECT_EQ(gradient([](const Tensor& x) { return clamp(x, 0, 2); }, value), none) << value;
  for (double value : {1.0, double(INFINITY)})
    EXPECT_EQ(gradient([](const Tensor& x) { return clamp(x, 0, INFINITY); }, value), all);
  EXPECT_EQ(gradient([&](const Tensor& x) { return maximum(x, other); }, NAN), all);
  EXPECT_EQ(gradient([&](const Tensor& x) { return maximum(other, x); }, NAN), all);
  EXPECT_EQ(gradient([&](const Tensor& x) { return minimum(x, other); }, NAN), all);
  EXPECT_EQ(gradient([&](const Tensor& x) { return minimum(other, x); }, NAN), all);
}

TEST_P(OpTable, InPlaceAndOut) {
  if (!row.in_place) GTEST_SKIP() << "has no in-place form";
  for_small([&](const Inputs& in) {
    const Tensor want = row.f(in);
    for (auto layout : {+[](const Tensor& t) { return t.detach(); },
                        +[](const Tensor& t) { return transposed(t); },
                        +[](const Tensor& t) { return stepped(t); }}) {
      Tensor out = layout(full(want.sizes(), 77, want.dtype()));
      row.out(out, in);
      EXPECT_TRUE(same_bits(out, want)) << "out";
      if (!(in[0].sizes() == want.sizes()) || in[0].dtype() != want.dtype()) continue;
      Tensor x = layout(contiguous_raw(in[0]).clone());
      const uint32_t version = x.version();
      row.in_place(x, Inputs(in.begin() + 1, in.end()));
      EXPECT_TRUE(same_bits(x, want)) << "in place";
      EXPECT_GT(x.version(), version);
    }
    if (!row.differentiable || !(in[0].sizes() == want.sizes())) return;
    // The derivative through a change in place, where it needs nothing that was overwritten.
    Row changed;
    changed.f = [this](const Inputs& t) {
      Tensor x = t[0] * 1;
      row.in_place(x, Inputs(t.begin() + 1, t.end()));
      return x * 1;
    };
    try {
      expect_near(derive(changed, in), derive(row, in), 1e-12, "in place");
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("in place"), std::string::npos) << e.what();
    }
  });
  EXPECT_THROW(
      {
        Inputs in = draw(row.samples[0], 0);
        in[0] = in[0].detach().set_requires_grad(true);
        row.in_place(in[0], Inputs(in.begin() + 1, in.end()));
      },
      Error)
      << "a leaf that requires a gradient";
}

TEST_P(OpTable, Refused) {
  if (row.refused.empty()) GTEST_SKIP() << "refuses nothing";
  for (size_t i = 0; i < row.refused.size(); ++i) {
    try {
      row.refused[i]();
      ADD_FAILURE() << "call " << i << " was not refused";
    } catch (const Error& e) {
      EXPECT_EQ(e.what()[0], '[') << e.what();
    }
  }
}

std::string case_name(const testing::TestParamInfo<Row>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Pointwise, OpTable, testing::ValuesIn(pointwise_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(Reductions, OpTable, testing::ValuesIn(reduction_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(Views, OpTable, testing::ValuesIn(view_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(Structured, OpTable, testing::ValuesIn(structured_rows()), case_name);

}  // namespace
}  // namespace sherd::test
