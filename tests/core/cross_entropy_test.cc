#include "core/cross_entropy.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

struct Result {
  std::vector<double> losses, log_sums, sums, dlogits;
};
// d(losses)/d(logits) times g[n] / divisor
Result reference(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& o,
                 const std::vector<double>& g, double divisor) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const auto x = values(logits);
  const auto w = o.weight.defined() ? values(o.weight) : std::vector<double>(size_t(n), 1);
  double total = 0;
  for (double v : w) total += v;
  Result r;
  r.sums = {0, 0};
  for (int64_t i = 0; i < rows; ++i) {
    const double* row = &x[size_t(i * n)];
    double top = row[0], sum = 0, smooth = 0;
    for (int64_t j = 0; j < n; ++j) top = std::max(top, row[j]);
    for (int64_t j = 0; j < n; ++j) sum += std::exp(row[j] - top);
    const double lse = top + std::log(sum), s = o.label_smoothing;
    for (int64_t j = 0; j < n; ++j) smooth += w[j] * (lse - row[j]);
    const int64_t t = targets.data<int64_t>()[i];
    const bool ignored = t == o.ignore_index;
    r.log_sums.push_back(top), r.log_sums.push_back(lse - top);
    r.losses.push_back(ignored ? 0 : (1 - s) * w[t] * (lse - row[t]) + s / double(n) * smooth);
    if (!ignored) r.sums[0] += r.losses.back(), r.sums[1] += w[t];
    for (int64_t j = 0; j < n; ++j) {
      const double p = std::exp(row[j] - lse);
      double d = ignored ? 0 : (1 - s) * w[t] * (p - (j == t)) + s / double(n) * (p * total - w[j]);
      r.dlogits.push_back(d * g[i] / divisor);
    }
  }
  return r;
}

DType compute(DType d) { return d == kFloat64 ? kFloat64 : kFloat32; }

TEST(CrossEntropy, IsTheReference) {
  for (auto [rows, n] : {std::pair<int64_t, int64_t>{1, 1}, {7, 11}, {53, 101}, {5, 1700}})
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16})
      for (double smoothing : {0.0, 0.1, 1.0})
        for (bool weighted : {false, true})
          for (bool each : {false, true}) {
            const Tensor logits = random_tensor({rows, n}, 1, d, -8, 8),
                         targets = random_indices(rows, n, 2);
            if (rows > 2) targets.data<int64_t>()[1] = -100;
            const CrossEntropyOptions o{
                -100, smoothing, weighted ? random_tensor({n}, 3, kFloat32, 0.1, 2) : Tensor()};
            const DType c = compute(d);
            const Tensor losses = empty({rows}, c), log_sums = empty({rows, 2}, c),
                         sums = empty({2}, c), dx = empty({rows, n}, d),
                         g = each ? random_tensor({rows}, 4, c) : from_values({0.7}, {1}, c);
            std::vector<double> up = values(g);
            if (!each) up.assign(size_t(rows), up[0]);
            cross_entropy_forward(kCPU, d)(logits, targets, o, losses, log_sums, sums);
            const Tensor divisor = each ? Tensor() : sums.as_strided_raw({}, {}, 1);
            cross_entropy_backward(kCPU, d)(g, divisor, logits, targets, log_sums, o, dx);
            const Result r = reference(logits, targets, o, up, each ? 1 : values(sums)[1]);
            const double t = 100 * epsilon(c);
            expect_close(losses, r.losses, t, t);
            expect_close(log_sums, r.log_sums, t, t);
            expect_close(sums, r.sums, t, t * double(rows));
            expect_close(dx, r.dlogits, t + epsilon(d), t + (d == kFloat16 ? 1e-7 : 0), name_of(d));
          }
}

TEST(CrossEntropy, InPlaceAndStridedRows) {
  const Tensor logits = random_tensor({9, 40}, 1), targets = random_indices(9, 40, 2),
               losses = empty({9}), log_sums = empty({9, 2}), sums = empty({2}),
               dx = empty({9, 40}), g = ones({});
  const CrossEntropyOptions o;
  cross_entropy_forward(kCPU, kFloat32)(logits, targets, o, losses, log_sums, sums);
  cross_entropy_backward(kCPU, kFloat32)(g, {}, logits, targets, log_sums, o, dx);
  const Tensor padded = padded_layout(logits), l2 = empty({9}), s2 = empty({2}), e2 = empty({9, 2});
  cross_entropy_forward(kCPU, kFloat32)(padded, targets, o, l2, e2, s2);
  EXPECT_TRUE(same_bits(losses, l2) && same_bits(sums, s2) && same_bits(log_sums, e2));
  cross_entropy_backward(kCPU, kFloat32)(g, {}, padded, targets, log_sums, o, padded);
  EXPECT_TRUE(same_bits(dx, padded));
  cross_entropy_backward(kCPU, kFloat32)(g, {}, logits, targets, log_sums, o, logits);
  EXPECT_TRUE(same_bits(dx, logits));
}

TEST(CrossEntropy, AllIgnoredAndEmpty) {
  const Tensor logits = random_tensor({3, 5}, 1), targets = tensor<int64_t>({7, 7, 7}),
               losses = empty({3}), log_sums = empty({3, 2}), sums = empty({2}),
               dx = full({3, 5}, 9);
  const CrossEntropyOptions o{.ignore_index = 7, .label_smoothing = 0.2, .weight = {}};
  cross_entropy_forward(kCPU, kFloat32)(logits, targets, o, losses, log_sums, sums);
  cross_entropy_backward(kCPU, kFloat32)(ones({}), sums.as_strided_raw({}, {}, 1), logits, targets,
                                         log_sums, o, dx);
  expect_close(losses, {0, 0, 0}, 0, 0);
  expect_close(sums, {0, 0}, 0, 0);
  expect_close(dx, std::vector<double>(15, 0.0), 0, 0);
  const Tensor none = empty({0, 5}), no_targets = empty({0}, kInt64), no_losses = empty({0});
  cross_entropy_forward(kCPU, kFloat32)(none, no_targets, o, no_losses, no_losses, sums);
  expect_close(sums, {0, 0}, 0, 0);
  cross_entropy_backward(kCPU, kFloat32)(ones({}), {}, none, no_targets, no_losses, o, none);
}

TEST(CrossEntropy, SpecialValues) {
  const double inf = INFINITY, nan = std::nan("");
  // A class of probability 0 that is not the target costs nothing; as the target it costs infinity.
  const Tensor logits = from_values({0, -inf, 0, 0, -inf, 0, 1, nan, 0}, {3, 3}, kFloat32),
               targets = tensor<int64_t>({0, 1, 0}), losses = empty({3}), log_sums = empty({3, 2}),
               sums = empty({2}), dx = empty({3, 3});
  cross_entropy_forward(kCPU, kFloat32)(logits, targets, {}, losses, log_sums, sums);
  expect_close(losses, {std::log(2), inf, nan}, 1e-6, 0);
  cross_entropy_backward(kCPU, kFloat32)(ones({}), {}, logits, targets, log_sums, {}, dx);
  const auto v = values(dx);
  expect_close({v.begin(), v.begin() + 6}, {-0.5, 0, 0.5, 0.5, -1, 0.5}, 1e-6, 0);
}

TEST(CrossEntropy, TargetsOutOfRangeAreNamed) {
  for (int64_t wrong : {int64_t(5), int64_t(-1), int64_t(1) << 40}) {
    const Tensor logits = zeros({3, 5}), targets = tensor<int64_t>({0, 4, wrong}), row = empty({3}),
                 sums = empty({2});
    try {
      cross_entropy_forward(kCPU, kFloat32)(logits, targets, {}, row, row, sums);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(
                    concat("target ", wrong, " at position 2 is out of range for 5 classes")),
                std::string::npos)
          << e.what();
    }
  }
}

TEST(CrossEntropy, SameBitsEverywhere) {
  for (DType d : {kFloat32, kBFloat16}) {
    auto run = [&](bool shift) {
      auto place = [&](const Tensor& t) { return shift ? shifted(t) : t; };
      const Tensor logits = place(random_tensor({70, 2003}, 1, d, -9, 9)),
                   targets = random_indices(70, 2003, 2), losses = empty({70}),
                   log_sums = empty({70, 2}), sums = empty({2}), dx = place(empty({70, 2003}, d));
      const CrossEntropyOptions o{.label_smoothing = 0.1,
                                  .weight = place(random_tensor({2003}, 3, kFloat32, 0, 1))};
      cross_entropy_forward(kCPU, d)(logits, targets, o, losses, log_sums, sums);
      cross_entropy_backward(kCPU, d)(ones({}), sums.as_strided_raw({}, {}, 1), logits, targets,
                                      log_sums, o, dx);
      return std::vector<Tensor>{losses, log_sums, sums, dx};
    };
    expect_same_bits_everywhere([&] { return run(false); }, name_of(d));
    const auto a = run(false), b = run(true);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << "shifted " << i;
  }
}

}  // namespace
}  // namespace sherd
