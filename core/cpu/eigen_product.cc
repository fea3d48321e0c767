#include <Eigen/Core>

#include "core/cpu/product.h"
#include "core/parallel_for.h"

namespace sherd::cpu {

template <class T>
void eigen_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<Dense, 0, Eigen::OuterStride<>>;
  auto map = [](const Matrix& m) {
    T* p = reinterpret_cast<T*>(m.data);
    return m.transposed ? Map(p, m.columns, m.rows, Eigen::OuterStride<>(m.ld))
                        : Map(p, m.rows, m.columns, Eigen::OuterStride<>(m.ld));
  };
  Eigen::setNbThreads(num_threads());
  if (!accumulate) map(c).setZero();
  auto run = [&](const auto& x, const auto& w) { map(c).noalias() += x * w; };
  const Map x = map(a), w = map(b);
  if (a.transposed)
    b.transposed ? run(x.transpose(), w.transpose()) : run(x.transpose(), w);
  else
    b.transposed ? run(x, w.transpose()) : run(x, w);
}
template void eigen_product<float>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<double>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<uint32_t>(const Matrix&, const Matrix&, const Matrix&, bool);
template void eigen_product<uint64_t>(const Matrix&, const Matrix&, const Matrix&, bool);

}  // namespace sherd::cpu
