#include "nn/init.h"

#include <algorithm>
#include <cmath>

#include "core/random.h"

namespace sherd::nn::init {

Initializer constant(double value) {
  return {[value](uint64_t, int64_t, const Tensor& t) {
    if (t.numel()) copy_raw(t, Tensor(value));
  }};
}
Initializer zeros() { return constant(0); }
Initializer ones() { return constant(1); }
Initializer uniform(double low, double high) {
  return {[=](uint64_t key, int64_t begin, const Tensor& t) {
    if (t.numel()) uniform_kernel(t.device(), t.dtype())({key, 0}, begin, low, high, t);
  }};
}
Initializer normal(double mean, double std) {
  return {[=](uint64_t key, int64_t begin, const Tensor& t) {
    if (t.numel()) normal_kernel(t.device(), t.dtype())({key, 0}, begin, mean, std, t);
  }};
}
Initializer trunc_normal(double mean, double std, double low, double high) {
  return {[=](uint64_t key, int64_t begin, const Tensor& t) {
    if (t.numel())
      trunc_normal_kernel(t.device(), t.dtype())({key, 0}, begin, mean, std, low, high, t);
  }};
}
Initializer kaiming_uniform(int64_t fan_in) {
  const double bound = 1 / std::sqrt(double(std::max<int64_t>(1, fan_in)));
  return uniform(-bound, bound);
}
Initializer xavier_uniform(int64_t fan_in, int64_t fan_out) {
  const double bound = std::sqrt(6 / double(std::max<int64_t>(1, fan_in + fan_out)));
  return uniform(-bound, bound);
}

}  // namespace sherd::nn::init
