// Its number of threads is the whole process's; here each thread has its own.
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#include <algorithm>

#include "core/cpu/product.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

constexpr int64_t kRows = 256;  // of c at a time, whatever the number of threads

template <class T>
void add_product(const Matrix& a, const Matrix& b, const Matrix& c) {
  using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<Dense, 0, Eigen::OuterStride<>>;
  auto map = [](const Matrix& m) {
    T* p = reinterpret_cast<T*>(m.data);
    return m.transposed ? Map(p, m.columns, m.rows, Eigen::OuterStride<>(m.ld))
                        : Map(p, m.rows, m.columns, Eigen::OuterStride<>(m.ld));
  };
  auto run = [&](const auto& x, const auto& w) { map(c).noalias() += x * w; };
  const Map x = map(a), w = map(b);
  if (a.transposed)
    b.transposed ? run(x.transpose(), w.transpose()) : run(x.transpose(), w);
  else
    b.transposed ? run(x, w.transpose()) : run(x, w);
}

}  // namespace

template <class T>
void eigen_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  constexpr DType t = sizeof(T) == 8 ? kFloat64 : kFloat32;  // of that size
  parallel_for(c.rows, kRows, [&](int64_t begin, int64_t end) {
    const Matrix to = c.block(begin, 0, end - begin, c.columns, t);
    if (!accumulate)
      for (int64_t i = 0; i < to.rows; ++i)
        std::fill_n(reinterpret_cast<T*>(to.at(i, 0, t)), to.columns, T(0));
    add_product<T>(a.block(begin, 0, end - begin, a.columns, t), b, to);
  });
}
template void eigen_product<float>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<double>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<uint32_t>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<uint64_t>(const Matrix&, const Matrix&, const Matrix&, bool);

}  // namespace sherd::cpu
