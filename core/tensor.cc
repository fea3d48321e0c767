#include "core/tensor.h"

#include <cmath>
#include <cstring>

#include "core/ops/copy.h"

namespace sherd {

bool Tensor::is_contiguous() const {
  const TensorImpl& t = get();
  int64_t p = 1;
  bool empty = false, dense = true;
  for (int i = t.sizes.n - 1; i >= 0; --i) {
    empty = empty || t.sizes[i] == 0;
    dense = dense && (t.sizes[i] == 1 || t.strides[i] == p);
    p *= t.sizes[i];
  }
  return dense || empty;
}

char* Tensor::bytes() const {
  TensorImpl& t = get();
  if (!t.storage->data() && t.storage->bytes() > 0 && t.storage->device().is_meta()) [[unlikely]]
    fail("a tensor of shape ", t.sizes,
         " on the meta device has no values to read or write (a parameter has some from its first "
         "use in a forward, or from materialize() on)");
  if (!t.storage->has_bytes()) [[unlikely]]
    fail("a tensor of shape ", t.sizes,
         " was used after its bytes were released (a sharded parameter outside of ",
         "its module's forward, or a freed buffer)");
  return t.storage->data() + t.offset * size_of(t.dtype);
}

Tensor Tensor::as_strided_raw(const Dims& sizes, const Dims& strides, int64_t offset) const {
  auto p = make_ref<TensorImpl>();
  p->storage = get().storage;
  p->sizes = sizes, p->strides = strides, p->offset = offset, p->dtype = get().dtype;
  p->family = family();
  return Tensor(std::move(p));
}

Tensor Tensor::detach() const {
  Tensor t = as_strided_raw(sizes(), strides(), storage_offset());
  t.p_->wrapped = get().wrapped;
  return t;
}

void Tensor::set_data(const Tensor& from) const {
  TensorImpl& t = get();
  const TensorImpl& f = from.get();
  t.storage = f.storage;
  t.sizes = f.sizes, t.strides = f.strides, t.offset = f.offset, t.dtype = f.dtype;
  t.is_view = f.is_view;
  const uint32_t version = t.family->version;
  t.family = make_ref<ViewFamily>();
  t.family->version = version + 1;  // who saved the tensor finds it changed
}

Ref<ViewFamily>& Tensor::family() const { return get().family; }
uint32_t Tensor::version() const { return get().family->version; }
void Tensor::bump_version() const { ++family()->version; }

Tensor Tensor::wrap_number(double d, int64_t i, DType dtype) {
  Tensor t = empty({}, dtype);
  switch (dtype) {
    case kBool:
      *t.data<bool>() = d != 0;
      break;
    case kInt64:
      *t.data<int64_t>() = i;
      break;
    default:
      *t.data<double>() = d;
  }
  t.p_->wrapped = true;
  return t;
}

double Tensor::item_double() const {
  if (numel() != 1) fail("[item] needs a tensor of one element, got shape ", sizes());
  return *to_raw(*this, kFloat64).data<double>();
}
int64_t Tensor::item_int(int64_t least, int64_t most) const {
  if (numel() != 1) fail("[item] needs a tensor of one element, got shape ", sizes());
  if (is_float(dtype())) {
    const double v = item_double();
    if (!(v >= double(least) && std::trunc(v) <= double(most) && v != 0x1p63))
      fail("[item] ", v, " is no whole number from ", least, " to ", most);
    return int64_t(v);
  }
  const int64_t v = *to_raw(*this, kInt64).data<int64_t>();
  if (v < least || v > most) fail("[item] ", v, " is not from ", least, " to ", most);
  return v;
}

Tensor over_storage(const Ref<Storage>& storage, const Dims& sizes, DType dtype, int64_t offset) {
  if (offset < 0 || (offset + sizes.numel()) * size_of(dtype) > storage->bytes())
    fail("[over_storage] shape ", sizes, " of ", dtype, " at offset ", offset,
         " does not fit into ", storage->bytes(), " bytes");
  auto p = make_ref<TensorImpl>();
  p->storage = storage;
  p->sizes = sizes, p->strides = contiguous_strides(sizes), p->offset = offset, p->dtype = dtype;
  p->family = make_ref<ViewFamily>();
  return Tensor(std::move(p));
}

Tensor empty(const Dims& sizes, DType dtype, Device device) {
  int64_t bytes = size_of(dtype);
  bool is_too_large = false, has_none = false;
  for (auto s : sizes) {
    if (s < 0) fail("[empty] a size is negative: ", sizes);
    is_too_large |= __builtin_mul_overflow(bytes, s, &bytes);
    has_none |= s == 0;
  }
  if (has_none) bytes = 0;
  if (is_too_large && !has_none)
    fail("[empty] shape ", sizes, " of ", dtype, " is too large: it takes more than 2^63 bytes");
  auto p = make_ref<TensorImpl>();
  p->sizes = sizes, p->strides = contiguous_strides(sizes), p->dtype = dtype;
  p->storage = make_ref<Storage>(bytes, device);
  p->family = make_ref<ViewFamily>();
  return Tensor(std::move(p));
}

Tensor full(const Dims& sizes, double value, DType dtype, Device device) {
  Tensor t = empty(sizes, dtype, device);
  copy_raw(t, scalar_for("full", value, dtype));
  return t;
}
Tensor scalar_for(const char* op, double value, DType dtype) {
  if (is_float(dtype) || dtype == kBool) {
    if (dtype == kFloat32 && std::isfinite(value) && std::isinf(float(value)))
      fail("[", op, "] ", value, " is no value of ", dtype, ": it is too large");
    return Tensor(value);
  }
  // As PyTorch, uint8 takes whole numbers below zero as their complement.
  const bool is_whole = value == std::trunc(value);
  const auto [least, most] = range_of(dtype);
  const double lowest = dtype == kUInt8 && is_whole ? -255 : least;
  if (!(value >= lowest && std::trunc(value) <= most && value != 0x1p63))
    fail("[", op, "] ", value, " is no value of ", dtype);
  return Tensor(int64_t(value));
}
Tensor zeros(const Dims& sizes, DType dtype, Device device) {
  Tensor t = empty(sizes, dtype, device);
  if (device.is_cpu() && t.nbytes()) std::memset(t.bytes(), 0, size_t(t.nbytes()));
  return t;
}
Tensor ones(const Dims& sizes, DType dtype, Device device) { return full(sizes, 1, dtype, device); }

template <class T>
Tensor tensor(std::span<const T> values, const Dims& sizes) {
  if (sizes.numel() != int64_t(values.size()))
    fail("[tensor] ", values.size(), " values do not fill shape ", sizes);
  Tensor t = empty(sizes, dtype_of<T>);
  if (!values.empty()) std::memcpy(t.bytes(), values.data(), values.size_bytes());
  return t;
}
template Tensor tensor<float>(std::span<const float>, const Dims&);
template Tensor tensor<double>(std::span<const double>, const Dims&);
template Tensor tensor<bool>(std::span<const bool>, const Dims&);
template Tensor tensor<int64_t>(std::span<const int64_t>, const Dims&);
template Tensor tensor<int32_t>(std::span<const int32_t>, const Dims&);
template Tensor tensor<uint8_t>(std::span<const uint8_t>, const Dims&);

Tensor contiguous_raw(const Tensor& x) {
  if (x.is_contiguous()) return x.detach();
  Tensor y = empty(x.sizes(), x.dtype(), x.device());
  copy_raw(y, x);
  return y;
}
Tensor to_raw(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x.detach();
  Tensor y = empty(x.sizes(), dtype, x.device());
  copy_raw(y, x);
  return y;
}

DType promote(std::span<const Tensor* const> in) {
  // of numbers, 0-d tensors, tensors with dimensions: 0 bool, 1 int, 2 float
  int category[3] = {-1, -1, -1};
  DType result[3] = {kBool, kBool, kBool};
  for (auto* t : in) {
    const int rank = t->impl()->wrapped ? 0 : t->dim() == 0 ? 1 : 2;
    const DType d = rank                   ? t->dtype()
                    : is_float(t->dtype()) ? kFloat32
                    : t->dtype() == kBool  ? kBool
                                           : kInt64;
    result[rank] = category[rank] < 0 ? d : promote(result[rank], d);
    category[rank] = std::max(category[rank], is_float(d) ? 2 : d != kBool);
  }
  int best = 2;
  for (int r : {1, 0})
    if (category[r] > category[best]) best = r;
  return result[best];
}

}  // namespace sherd
