#include "core/gemm.h"

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "core/allocator.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

// In float64, summed in order.
std::vector<double> reference(const Tensor& a, const Tensor& b, const Tensor& bias = {},
                              const std::vector<double>& before = {}) {
  const int64_t batch = a.dim() == 3 ? a.size(0) : 1, m = a.size(-2), k = a.size(-1),
                n = b.size(-1);
  const std::vector<double> x = values(a), w = values(b),
                            c = bias.defined() ? values(bias) : std::vector<double>();
  std::vector<double> y(static_cast<size_t>(batch * m * n));
  for (int64_t q = 0; q < batch; ++q)
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double s = before.empty() ? 0 : before[(q * m + i) * n + j];
        if (!c.empty()) s = c[j];
        for (int64_t p = 0; p < k; ++p) s += x[(q * m + i) * k + p] * w[(q * k + p) * n + j];
        y[(q * m + i) * n + j] = s;
      }
  return y;
}
// Each of k products of numbers below 1, and each of the sums below sqrt(k), may round; a 16-bit
// result rounds once more.
double tolerance(DType out, int64_t k) { return epsilon(kFloat32) * double(k + 8) + epsilon(out); }

class Gemm : public ::testing::TestWithParam<GemmBackend> {
 protected:
  void SetUp() override { set_gemm_backend(GetParam()); }
  void TearDown() override { set_gemm_backend(before_); }
  GemmBackend before_ = gemm_backend();
};
// The thread sanitizer cannot see how oneDNN's threads synchronise.
#ifdef __SANITIZE_THREAD__
constexpr GemmBackend kBackends[] = {GemmBackend::kEigen};
#else
constexpr GemmBackend kBackends[] = {GemmBackend::kOneDNN, GemmBackend::kEigen};
#endif
INSTANTIATE_TEST_SUITE_P(Backends, Gemm, ::testing::ValuesIn(kBackends), [](auto& p) {
  return p.param == GemmBackend::kOneDNN ? "OneDNN" : "Eigen";
});

struct Shape {
  int64_t m, n, k;
};
const Shape kShapes[] = {{1, 1, 1},   {1, 7, 11},  {7, 1, 5},    {5, 3, 1},
                         {7, 11, 53}, {53, 7, 11}, {101, 53, 7}, {64, 48, 33}};

TEST_P(Gemm, EveryLayoutOfBothInputs) {
  for (auto [m, n, k] : kShapes)
    for (DType d : {kFloat32, kFloat64}) {
      const Tensor a = random_tensor({m, k}, 1, d), b = random_tensor({k, n}, 2, d);
      const std::vector<double> want = reference(a, b);
      int which = 0;
      for (const Tensor& x : {a, transposed_layout(a), padded_layout(a), shifted(a)})
        for (const Tensor& w : {b, transposed_layout(b), padded_layout(b), shifted(b)}) {
          const Tensor y = full({m, n}, std::nan(""), d);
          gemm(x, w, y);
          expect_close(y, want, epsilon(d) * double(k), epsilon(d) * double(k),
                       concat(m, "x", n, "x", k, " layout ", which++));
        }
    }
}

TEST_P(Gemm, EveryLayoutOfTheOutput) {
  const int64_t m = 13, n = 22, k = 31;
  const Tensor a = random_tensor({m, k}, 1), b = random_tensor({k, n}, 2),
               bias = random_tensor({n}, 3);
  for (bool with_bias : {false, true}) {
    const Tensor before = random_tensor({m, n}, 4);
    for (const Tensor& y : {transposed_layout(before), padded_layout(before), shifted(before),
                            transposed_layout(padded_layout(before))}) {
      gemm(a, b, y, {.bias = with_bias ? bias : Tensor()});
      expect_close(y, reference(a, b, with_bias ? bias : Tensor()), 0, tolerance(kFloat32, k));
    }
  }
  // What lies between the rows stays as it was.
  const Tensor memory = full({m, n + 3}, 99), y = memory.as_strided_raw({m, n}, {n + 3, 1}, 0);
  gemm(a, b, y);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = n; j < n + 3; ++j) EXPECT_EQ(memory.data<float>()[i * (n + 3) + j], 99);
}

TEST_P(Gemm, NeitherStrideIsOne) {
  const Tensor memory = random_tensor({10, 12, 2}, 1);
  const Tensor a = memory.as_strided_raw({10, 12}, {24, 2}, 0), b = random_tensor({12, 9}, 2),
               y = empty({10, 9}), wide = empty({10, 9, 2}),
               strided = wide.as_strided_raw({10, 9}, {18, 2}, 1);
  gemm(a, b, y);
  expect_close(y, reference(a, b), 0, tolerance(kFloat32, 12));
  gemm(a, b, strided);
  EXPECT_TRUE(same_bits(y, strided));
  const Tensor expanded = random_tensor({12}, 3).as_strided_raw({10, 12}, {0, 1}, 0);
  gemm(expanded, b, y);
  expect_close(y, reference(expanded, b), 0, tolerance(kFloat32, 12));
}

TEST_P(Gemm, Accumulate) {
  for (auto [m, n, k] : kShapes)
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16}) {
      const Tensor a = random_tensor({k, m}, 1, d).as_strided_raw({m, k}, {1, m}, 0),
                   b = random_tensor({k, n}, 2, d);
      for (DType out : {d, d == kFloat64 ? kFloat64 : kFloat32}) {
        const Tensor y = random_tensor({m, n}, 3, out);
        const std::vector<double> want = reference(a, b, {}, values(y));
        gemm(a, b, y, {.accumulate = true});
        expect_close(y, want, tolerance(out, k), tolerance(out, k));
      }
    }
}

TEST_P(Gemm, BiasAndActivations) {
  for (auto [m, n, k] : kShapes)
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16})
      for (DType bias_type : {d, kFloat32}) {
        const Tensor a = random_tensor({m, k}, 1, d),
                     b = random_tensor({n, k}, 2, d).as_strided_raw({k, n}, {1, k}, 0),
                     bias = random_tensor({n}, 3, bias_type);
        std::vector<double> want = reference(a, b, bias);
        const Tensor y = empty({m, n}, d);
        // A 16-bit result is rounded before GELU, whose slope is below 1.2, and after.
        const double t = 2.5 * tolerance(d, k);
        auto check = [&](Activation activation, auto f) {
          gemm(a, b, y, {.bias = bias, .activation = activation});
          std::vector<double> v = want;
          for (auto& x : v) x = f(x);
          expect_close(y, v, t, t, concat(name_of(d), " activation ", int(activation)));
        };
        check(Activation::kNone, [](double x) { return x; });
        check(Activation::kRelu, [](double x) { return std::max(x, 0.0); });
        check(Activation::kGelu,
              [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2))); });
        check(Activation::kGeluTanh, [](double x) {
          return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        });
      }
}

TEST_P(Gemm, ReluIsTheSameBitsFusedAndApart) {
  for (DType d : {kFloat32, kBFloat16}) {
    const Tensor a = random_tensor({37, 64}, 1, d), b = random_tensor({64, 53}, 2, d),
                 bias = random_tensor({53}, 3, d), fused = empty({37, 53}, d),
                 apart = empty({37, 53}, d);
    gemm(a, b, fused, {.bias = bias, .activation = Activation::kRelu});
    gemm(a, b, apart, {.bias = bias});
    apply_activation(Activation::kRelu, apart);
    EXPECT_TRUE(same_bits(fused, apart)) << name_of(d);
  }
}

TEST_P(Gemm, Batched) {
  const int64_t batch = 5, m = 9, n = 14, k = 21;
  for (DType d : {kFloat32, kFloat64, kBFloat16, kInt64}) {
    const Tensor a = random_tensor({batch, m, k}, 1, d, -8, 8),
                 b = random_tensor({batch, k, n}, 2, d, -8, 8), y = empty({batch, m, n}, d);
    const double t = is_float(d) ? 64 * tolerance(d, k) : 0;
    for (const Tensor& x : {a, transposed_layout(a), padded_layout(a)}) {
      gemm(x, b, y);
      expect_close(y, reference(a, b), t, t);
    }
    const Tensor one = b.as_strided_raw({batch, k, n}, {0, n, 1}, 0);
    gemm(a, one, y);
    expect_close(y, reference(a, one), t, t);
    // Batch and rows exchanged in memory, as heads are.
    const Tensor heads = random_tensor({m, batch, k}, 3, d, -8, 8)
                             .as_strided_raw({batch, m, k}, {k, batch * k, 1}, 0);
    const Tensor out = empty({m, batch, n}, d).as_strided_raw({batch, m, n}, {n, batch * n, 1}, 0);
    gemm(heads, b, out);
    expect_close(out, reference(heads, b), t, t);
  }
}

TEST_P(Gemm, Integers) {
  for (DType d : {kInt32, kInt64}) {
    const Tensor a = random_tensor({11, 7}, 1, d, -100, 100),
                 b = random_tensor({7, 13}, 2, d, -100, 100), y = full({11, 13}, 5, d);
    const std::vector<double> before = values(y);
    gemm(a, b, y, {.accumulate = true});
    expect_close(y, reference(a, b, {}, before), 0, 0);
  }
  // They wrap around, as PyTorch's do.
  const Tensor big = tensor<int32_t>({1 << 30, 1 << 30, 1 << 30, 1 << 30})
                         .as_strided_raw({1, 4}, {4, 1}, 0),
               ones = tensor<int32_t>({1, 1, 1, 1}).as_strided_raw({4, 1}, {1, 1}, 0),
               y = empty({1, 1}, kInt32);
  gemm(big, ones, y);
  EXPECT_EQ(*y.data<int32_t>(), 0);
}

TEST_P(Gemm, SixteenBitsLargerThanABlock) {
  // More than a block in every direction, one at a time, so that all block loops turn.
  for (auto [m, n, k] : {Shape{1030, 17, 9}, Shape{9, 1100, 17}, Shape{17, 9, 2100}})
    for (DType d : {kBFloat16, kFloat16})
      for (DType out : {d, kFloat32}) {
        const Tensor a = random_tensor({m, k}, 1, d),
                     b = transposed_layout(random_tensor({k, n}, 2, d)),
                     bias = random_tensor({n}, 3, d), y = random_tensor({m, n}, 4, out);
        const std::vector<double> want = reference(a, b, {}, values(y));
        gemm(a, b, y, {.accumulate = true});
        expect_close(y, want, tolerance(out, k), tolerance(out, k));
        gemm(a, b, y, {.bias = bias, .activation = Activation::kRelu});
        std::vector<double> rectified = reference(a, b, bias);
        for (auto& x : rectified) x = std::max(x, 0.0);
        expect_close(y, rectified, tolerance(out, k), tolerance(out, k));
      }
}

TEST_P(Gemm, SpecialValues) {
  const double inf = INFINITY, nan = std::nan("");
  for (DType d : {kFloat32, kFloat64, kBFloat16}) {
    const Tensor a = from_values({1, 2, inf, 1, 0, nan}, {3, 2}, d),
                 b = from_values({1, -inf, 0, 1}, {2, 2}, d), y = full({3, 2}, nan, d);
    gemm(a, b, y);
    expect_close(y, {1, -inf, inf, -inf, nan, nan}, 0, 0, name_of(d));
  }
}

TEST_P(Gemm, EmptySizes) {
  gemm(empty({0, 3}), empty({3, 4}), empty({0, 4}));
  gemm(empty({2, 3}), empty({3, 0}), empty({2, 0}));
  const Tensor bias = tensor<float>({-1, 2}), y = full({3, 2}, 7);
  gemm(empty({3, 0}), empty({0, 2}), y, {.accumulate = true});
  expect_close(y, {7, 7, 7, 7, 7, 7}, 0, 0);
  gemm(empty({3, 0}), empty({0, 2}), y, {.bias = bias, .activation = Activation::kRelu});
  expect_close(y, {0, 2, 0, 2, 0, 2}, 0, 0);
  gemm(empty({3, 0}), empty({0, 2}), y);
  expect_close(y, {0, 0, 0, 0, 0, 0}, 0, 0);
  const Tensor meta = empty({5, 6}, kFloat32, kMeta);
  gemm(empty({5, 4}, kFloat32, kMeta), empty({4, 6}, kFloat32, kMeta), meta);
}

TEST_P(Gemm, BitsDoNotDependOnAlignment) {
  for (DType d : {kFloat32, kBFloat16})
    for (auto [m, n, k] : {Shape{64, 96, 80}, Shape{33, 47, 101}, Shape{256, 64, 512}}) {
      const Tensor a = random_tensor({m, k}, 1, d), b = random_tensor({n, k}, 2, d);
      auto w = [k = k, n = n](const Tensor& t) {
        return t.as_strided_raw({k, n}, {1, k}, t.storage_offset());
      };
      const Tensor y = empty({m, n}, d), z = shifted(y);
      gemm(a, w(b), y);
      gemm(shifted(a), w(shifted(b)), z);
      EXPECT_TRUE(same_bits(y, z)) << name_of(d) << " " << m << "x" << n << "x" << k;
    }
}

TEST_P(Gemm, FollowsTheNumberOfThreads) {
  const Tensor a = random_tensor({200, 300}, 1), b = random_tensor({300, 250}, 2);
  const std::vector<double> want = reference(a, b);
  for (int threads : {1, 2, 3}) {
    Threads guard(threads);
    std::thread([&] {  // a thread of its own starts with OpenMP's default
      const Tensor y = empty({200, 250});
      gemm(a, b, y);
      expect_close(y, want, 0, tolerance(kFloat32, 300));
    })
        .join();
    const Tensor x = random_tensor({16, 20, 30}, 3), w = random_tensor({16, 30, 10}, 4),
                 y = empty({16, 20, 10});
    gemm(x, w, y);
    expect_close(y, reference(x, w), 0, tolerance(kFloat32, 30));
  }
}

TEST_P(Gemm, SteadyStateAsksTheSystemForNothing) {
  const Tensor a = random_tensor({64, 128}, 1, kBFloat16),
               b = random_tensor({128, 96}, 2, kBFloat16), y = empty({64, 96}, kBFloat16),
               bias = random_tensor({96}, 3);
  auto step = [&] { gemm(a, b, y, {.bias = bias, .activation = Activation::kRelu}); };
  step();
  const int64_t calls = memory_stats().system_calls;
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(memory_stats().system_calls, calls);
}

TEST(GemmBackends, Agree) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "needs oneDNN";
#endif
  const Tensor a = random_tensor({120, 300}, 1), b = random_tensor({300, 77}, 2),
               x = empty({120, 77}), y = empty({120, 77});
  const GemmBackend before = gemm_backend();
  set_gemm_backend(GemmBackend::kOneDNN);
  gemm(a, b, x);
  set_gemm_backend(GemmBackend::kEigen);
  gemm(a, b, y);
  set_gemm_backend(before);
  expect_close(x, values(y), 0, tolerance(kFloat32, 300));
}

void expect_error(const std::string& part, auto f) {
  try {
    f();
    ADD_FAILURE() << "no error, expected one with \"" << part << '"';
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(GemmErrors, NameWhatIsWrong) {
  const Tensor a = zeros({2, 3}), b = zeros({3, 4}), y = zeros({2, 4});
  expect_error("[gemm] the shapes do not fit", [&] { gemm(a, zeros({2, 4}), y); });
  expect_error("got [2, 3] x [3, 4] into [2, 3]", [&] { gemm(a, b, zeros({2, 3})); });
  expect_error("needs matrices", [&] { gemm(zeros({3}), b, y); });
  expect_error("batch sizes differ", [&] {
    gemm(zeros({5, 2, 3}), zeros({4, 3, 4}), zeros({5, 2, 4}));
  });
  expect_error("float32 x float64", [&] { gemm(a, zeros({3, 4}, kFloat64), y); });
  expect_error("not defined for bool", [&] {
    gemm(zeros({2, 3}, kBool), zeros({3, 4}, kBool), zeros({2, 4}, kBool));
  });
  expect_error("bias of shape [4]", [&] { gemm(a, b, y, {.bias = zeros({3})}); });
  expect_error("accumulate excludes",
               [&] { gemm(a, b, y, {.accumulate = true, .bias = zeros({4})}); });
  expect_error("expanded", [&] { gemm(a, b, zeros({4}).as_strided_raw({2, 4}, {0, 1}, 0)); });
  expect_error("needs floats", [&] {
    gemm(zeros({2, 3}, kInt64), zeros({3, 4}, kInt64), zeros({2, 4}, kInt64),
         {.activation = Activation::kRelu});
  });
}

class Bf16 : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / "sherd_bf16_cache";
    std::filesystem::remove_all(folder_);
    ::setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  }
  void TearDown() override {
    set_bf16_products(Bf16Products::kAuto);
    std::filesystem::remove_all(folder_);
  }
  std::filesystem::path folder_;
};

bool has_native() {
  try {
    set_bf16_products(Bf16Products::kNative);
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST_F(Bf16, NativeAndConvertedAgree) {
  if (!has_native()) GTEST_SKIP() << "no native bf16 products on this processor";
  for (auto [m, n, k] : kShapes)
    for (DType out : {kBFloat16, kFloat32}) {
      const Tensor a = random_tensor({m, k}, 1, kBFloat16), b = random_tensor({k, n}, 2, kBFloat16),
                   bias = random_tensor({n}, 3);
      for (auto choice : {Bf16Products::kNative, Bf16Products::kConverted}) {
        set_bf16_products(choice);
        const Tensor y = empty({m, n}, out);
        gemm(a, b, y);
        expect_close(y, reference(a, b), tolerance(out, k), tolerance(out, k), name_of(choice));
        gemm(a, b, y, {.bias = bias});
        expect_close(y, reference(a, b, bias), tolerance(out, k), tolerance(out, k),
                     name_of(choice));
        const std::vector<double> before = values(y);
        gemm(a, b, y, {.accumulate = true});
        expect_close(y, reference(a, b, {}, before), tolerance(out, k), tolerance(out, k),
                     name_of(choice));
      }
    }
}

TEST_F(Bf16, AutoMeasuresOnceAndKeepsTheRates) {
  if (!has_native() || gemm_backend() != GemmBackend::kOneDNN)
    GTEST_SKIP() << "there is nothing to choose from";
  set_bf16_products(Bf16Products::kAuto);
  const Bf16Products first = bf16_products();
  EXPECT_NE(first, Bf16Products::kAuto);
  const auto file = folder_ / "sherd" / "bf16_products.txt";
  ASSERT_TRUE(std::filesystem::exists(file));
  const auto size = std::filesystem::file_size(file);
  const std::string text = describe_bf16_products();
  EXPECT_NE(text.find("GFLOP/s"), std::string::npos) << text;
  EXPECT_NE(text.find(name_of(first)), std::string::npos) << text;
  set_bf16_products(Bf16Products::kAuto);
  EXPECT_EQ(bf16_products(), first);
  EXPECT_EQ(std::filesystem::file_size(file), size) << "measured again";
}

}  // namespace
}  // namespace sherd
