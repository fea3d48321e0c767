#include "tests/autograd/op_table.h"

#include "tests/core/support.h"

namespace sherd::test {

Tensor In::draw(uint64_t seed) const {
  switch (kind) {
    case kNone:
      return {};
    case kReal:
      return random_tensor(sizes, seed, kFloat64, low, high);
    case kTruth: {
      const Tensor t = empty(sizes, kBool), u = random_tensor(sizes, seed, kFloat64, 0, 1);
      for (int64_t i = 0; i < t.numel(); ++i) t.data<bool>()[i] = u.data<double>()[i] < 0.6;
      return t;
    }
    case kIndex:
      break;
  }
  return random_indices(sizes.numel(), below, seed)
      .as_strided_raw(sizes, contiguous_strides(sizes), 0);
}

Inputs draw(const Sample& sample, uint64_t seed) {
  Inputs in;
  for (size_t k = 0; k < sample.size(); ++k) in.push_back(sample[k].draw(seed + k));
  return in;
}

double at(const Tensor& t, const Dims& index) {
  int64_t offset = 0;
  for (int i = 0; i < index.n; ++i) offset += index[i] * t.strides()[i];
  switch (t.dtype()) {
    case kFloat64:
      return t.data<double>()[offset];
    case kInt64:
      return double(t.data<int64_t>()[offset]);
    case kBool:
      return t.data<bool>()[offset];
    default:
      fail("[at] unexpected ", t.dtype());
  }
}

void for_each_index(const Dims& sizes, const std::function<void(const Dims&)>& f) {
  if (sizes.numel() == 0) return;
  Dims index = sizes;
  for (int i = 0; i < index.n; ++i) index[i] = 0;
  while (true) {
    f(index);
    int d = index.n - 1;
    while (d >= 0 && ++index[d] == sizes[d]) index[d--] = 0;
    if (d < 0) return;
  }
}

Tensor build(const Dims& sizes, const std::function<double(const Dims&)>& f) {
  const Tensor t = empty(sizes, kFloat64);
  int64_t i = 0;
  for_each_index(sizes, [&](const Dims& index) { t.data<double>()[i++] = f(index); });
  return t;
}

double broadcast_at(const Tensor& t, const Dims& index) {
  Dims mine = t.sizes();
  for (int i = 0; i < mine.n; ++i) mine[i] = t.size(i) == 1 ? 0 : index[i + index.n - mine.n];
  return at(t, mine);
}

Dims with(Dims index, int d, int64_t i) {
  index[d] = i;
  return index;
}
Dims head(const Dims& index, int n) { return Dims(std::span(index.d, size_t(n))); }
Dims tail(const Dims& index, int n) { return Dims(std::span(index.d + index.n - n, size_t(n))); }
Dims joined(const Dims& a, const Dims& b) {
  Dims r = a;
  for (auto x : b) r.push(x);
  return r;
}

}  // namespace sherd::test
