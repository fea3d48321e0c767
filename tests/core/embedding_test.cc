#include "core/embedding.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

TEST(Embedding, RowsOfTheTable) {
  for (DType d : {kFloat32, kFloat64, kBFloat16, kInt64})
    for (DType index_type : {kInt64, kInt32}) {
      const Tensor table = random_tensor({11, 7}, 1, d, -50, 50),
                   indices = to_raw(random_indices(53, 11, 2), index_type);
      const auto v = values(table), at = values(indices);
      std::vector<double> want;
      for (double i : at)
        for (int c = 0; c < 7; ++c) want.push_back(v[size_t(i) * 7 + c]);
      const Tensor y = empty({53, 7}, d);
      embedding_forward(kCPU, d)(table, indices, y);
      expect_close(y, want, 0, 0);
      embedding_forward(kCPU, d)(padded_layout(table), indices, y);
      expect_close(y, want, 0, 0);
    }
}

TEST(Embedding, GradientSumsByRow) {
  for (auto [rows, n, count] :
       {std::tuple<int64_t, int64_t, int64_t>{11, 7, 200}, {1000, 53, 60}, {1, 3, 9}})
    for (DType d : {kFloat32, kFloat64, kBFloat16})
      for (DType out : {d, d == kFloat64 ? kFloat64 : kFloat32})
        for (bool accumulate : {false, true})
          for (int64_t padding : {int64_t(-1), int64_t(0)}) {
            const Tensor g = random_tensor({count, n}, 1, d),
                         indices = random_indices(count, rows, 2),
                         dw = accumulate ? random_tensor({rows, n}, 3, out)
                                         : full({rows, n}, std::nan(""), out);
            std::vector<double> want =
                accumulate ? values(dw) : std::vector<double>(size_t(rows * n), 0.0);
            const auto up = values(g);
            for (int64_t i = 0; i < count; ++i) {
              const int64_t v = indices.data<int64_t>()[i];
              for (int64_t c = 0; c < n && v != padding; ++c) want[v * n + c] += up[i * n + c];
            }
            embedding_backward(kCPU, d)(g, indices, padding, accumulate, dw);
            const double t = 300 * epsilon(d == kFloat64 ? d : kFloat32) + epsilon(out);
            expect_close(dw, want, t, t);
          }
}

TEST(Embedding, SameBitsEverywhere) {
  for (DType d : {kFloat32, kBFloat16})
    expect_same_bits_everywhere(
        [&] {
          const Tensor g = random_tensor({5000, 33}, 1, d), indices = random_indices(5000, 701, 2),
                       dw = empty({701, 33}, d);
          embedding_backward(kCPU, d)(g, indices, -1, false, dw);
          return std::vector<Tensor>{dw};
        },
        name_of(d));
}

TEST(Embedding, IndicesOutOfRangeAreNamed) {
  for (int64_t wrong : {int64_t(11), int64_t(-1)}) {
    const Tensor table = zeros({11, 2}), indices = tensor<int64_t>({3, wrong}), y = empty({2, 2});
    for (bool backward : {false, true}) try {
        if (backward)
          embedding_backward(kCPU, kFloat32)(y, indices, -1, false, table);
        else
          embedding_forward(kCPU, kFloat32)(table, indices, y);
        ADD_FAILURE();
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find(
                      concat("index ", wrong, " at position 1 is out of range for a table of 11")),
                  std::string::npos)
            << e.what();
      }
  }
}

TEST(Embedding, Empty) {
  const Tensor table = ones({4, 3}), none = empty({0}, kInt64);
  embedding_forward(kCPU, kFloat32)(table, none, empty({0, 3}));
  embedding_backward(kCPU, kFloat32)(empty({0, 3}), none, -1, false, table);
  expect_close(table, std::vector<double>(12, 0.0), 0, 0);
}

}  // namespace
}  // namespace sherd
