#include "core/column_sum.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

TEST(ColumnSum, IsTheReference) {
  for (auto [rows, n] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 11}, {53, 101}, {1000, 7}, {300, 1500}, {0, 4}})
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16})
      for (DType out : {d, d == kFloat64 ? kFloat64 : kFloat32})
        for (bool accumulate : {false, true}) {
          const Tensor x = random_tensor({rows, n}, 1, d), before = random_tensor({n}, 2, out);
          std::vector<double> want =
              accumulate ? values(before) : std::vector<double>(size_t(n), 0.0);
          const auto v = values(x);
          for (size_t i = 0; i < v.size(); ++i) want[i % size_t(n)] += v[i];
          const double t = epsilon(d == kFloat64 ? d : kFloat32) * double(rows + 1);
          for (const Tensor& in : {x, padded_layout(x)}) {
            const Tensor y = empty({n}, out);
            copy_raw(y, before);
            column_sum_kernel(kCPU, d)(in, y, accumulate);
            expect_close(y, want, t + epsilon(out), t);
          }
        }
}

TEST(ColumnSum, SameBitsEverywhere) {
  for (DType d : {kFloat32, kBFloat16}) {
    auto run = [&](bool shift) {
      const Tensor x = random_tensor({777, 1234}, 1, d), y = empty({1234});
      column_sum_kernel(kCPU, d)(shift ? shifted(x) : x, y, false);
      return std::vector<Tensor>{y};
    };
    expect_same_bits_everywhere([&] { return run(false); }, name_of(d));
    EXPECT_TRUE(same_bits(run(false)[0], run(true)[0]));
  }
}

}  // namespace
}  // namespace sherd
