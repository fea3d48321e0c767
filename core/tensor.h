// Tensor: a strided view of a Storage. Copies of a Tensor are the same tensor (a reference), as in
// PyTorch.
//
//     Tensor x = zeros({2, 3});                     // float32 on the cpu
//     Tensor y = (x + 1).view({-1}).to(kFloat64);   // broadcasts, promotes, records, as in PyTorch
//     double s = y.sum().item<double>();
//
// The functions declared here that compute or make views record on the autograd tape; they are
// defined in autograd/. Those under "raw" do not record, and are all that core's own kernels use.
// `std::cout << x` and to_string(x) print it in PyTorch's layout. More operators: autograd/ops.h.
// An undefined Tensor (default-constructed) stands for "none"; most calls on it are errors.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "core/device.h"
#include "core/dims.h"
#include "core/dtype.h"
#include "core/ref.h"
#include "core/storage.h"

namespace sherd {

class Tensor;

// [Note: version counters] A tensor and its views form a family that shares one counter, raised by
// each in-place change. Autograd notes it when it saves a tensor and compares when it unpacks. It
// is not the Storage's: parameters share one flat Storage, and a write to one must not condemn the
// others.
struct ViewFamily : Counted {
  uint32_t version = 0;
};

struct TensorImpl : Counted {
  Ref<Storage> storage;
  Dims sizes, strides;  // in elements
  int64_t offset = 0;   // in elements
  DType dtype = kFloat32;
  bool wrapped = false;      // a number: takes part in promotion by its category alone
  bool is_view = false;      // by an op that records: see [Note: views and in-place changes]
  bool placeholder = false;  // a sharded parameter outside of its module's forward: ops refuse it
  Ref<ViewFamily> family;    // made at first need: see Tensor::family()
  Ref<Counted> autograd;     // autograd::AutogradMeta; none for a plain constant
};

class Tensor {
 public:
  Tensor() = default;
  // A number as a 0-d tensor that takes part in promotion by its category alone: x + 1 has x's
  // dtype.
  template <class N>
  requires std::is_arithmetic_v<N> Tensor(N number)
      : Tensor(wrap_number(double(number), int64_t(number),
                           std::is_same_v<N, bool> ? kBool
                           : std::is_integral_v<N> ? kInt64
                                                   : kFloat64)) {}
  explicit Tensor(Ref<TensorImpl> p) : p_(std::move(p)) {}

  bool defined() const { return bool(p_); }
  TensorImpl* impl() const { return p_.get(); }
  bool is_same(const Tensor& o) const { return p_ == o.p_; }

  const Dims& sizes() const { return get().sizes; }
  const Dims& strides() const { return get().strides; }  // in elements
  DType dtype() const { return get().dtype; }
  Device device() const { return get().storage->device(); }
  int dim() const { return sizes().n; }
  int64_t size(int64_t i) const { return sizes()[wrap_dim("size", i, dim())]; }
  int64_t stride(int64_t i) const { return strides()[wrap_dim("stride", i, dim())]; }
  int64_t numel() const { return sizes().numel(); }
  int64_t nbytes() const { return numel() * size_of(dtype()); }
  bool is_contiguous() const;

  // ---- raw: no recording
  const Ref<Storage>& storage() const { return get().storage; }
  int64_t storage_offset() const { return get().offset; }  // in elements
  char* bytes() const;  // first element; Error if the Storage's bytes were released
  template <class T>
  T* data() const {
    if (dtype() != dtype_of<T>)
      fail("[data] a ", name_of(dtype()), " tensor was read as ", name_of(dtype_of<T>));
    return reinterpret_cast<T*>(bytes());
  }
  Tensor as_strided_raw(const Dims& sizes, const Dims& strides,
                        int64_t offset) const;  // same family, not recorded
  Tensor detach() const;                        // same bytes and family, no history
  // Makes this tensor object refer to what `from` does (bytes, sizes, dtype), with a view family of
  // its own; its autograd state stays. All copies of this Tensor see it.
  void set_data(const Tensor& from) const;
  Ref<ViewFamily>& family() const;
  uint32_t version() const;   // of the family; 0 if nothing ever asked for one
  void bump_version() const;  // after a change in place

  // ---- autograd (defined in autograd/)
  bool requires_grad() const;              // is a leaf that asks for a gradient, or has a history
  Tensor& requires_grad_(bool on = true);  // of a leaf; Error for integers and for results of ops
  const Tensor& set_requires_grad(bool on = true) const;
  bool is_leaf() const;
  Tensor grad() const;                   // undefined: none
  void set_grad(const Tensor& g) const;  // shape checked; undefined clears
  // d(this)/d(leaves) into the leaves' grad(). `gradient` may be left out for a tensor of one
  // element.
  void backward(const Tensor& gradient = {}, bool retain_graph = false,
                bool create_graph = false) const;

  // ---- views and copies, recorded
  Tensor view(const Dims& sizes) const;  // one size may be -1; Error where strides do not allow it
  Tensor reshape(const Dims& sizes) const;  // copies if it must
  Tensor flatten(int64_t start = 0, int64_t end = -1) const;
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor t() const;
  Tensor permute(const Dims& dims) const;
  Tensor expand(const Dims& sizes) const;  // -1 keeps a size
  Tensor squeeze() const;
  Tensor squeeze(int64_t dim) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor contiguous() const;
  Tensor clone() const;
  Tensor to(DType dtype) const;
  Tensor to(Device device) const;

  // ---- computations, recorded (more in autograd/ops.h)
  Tensor sum(const Dims& dims = {}, bool keepdim = false) const;
  Tensor mean(const Dims& dims = {}, bool keepdim = false) const;
  Tensor matmul(const Tensor& o) const;

  // ---- in place: they return *this and raise the version
  Tensor& add_(const Tensor& o, double alpha = 1);
  Tensor& sub_(const Tensor& o);
  Tensor& mul_(const Tensor& o);
  Tensor& div_(const Tensor& o);
  Tensor& copy_(const Tensor& from);  // broadcasts and converts
  Tensor& fill_(double value);
  Tensor& zero_();

  // The only element, converted. Error if there are more or none, or if an integer T has no room
  // for it. On an accelerator this waits for the device.
  template <class T = double>
  T item() const {
    static_assert(std::is_arithmetic_v<T>);
    if constexpr (std::is_same_v<T, bool>)
      return item_double() != 0;
    else if constexpr (std::is_integral_v<T>)
      return T(item_int(std::numeric_limits<T>::min(),
                        int64_t(std::min<uint64_t>(std::numeric_limits<T>::max(), INT64_MAX))));
    else
      return T(item_double());
  }

 private:
  // Friends alone, so that numbers do not become tensors to be printed.
  friend std::string to_string(const Tensor& tensor);
  friend std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

  static Tensor wrap_number(double d, int64_t i, DType dtype);
  TensorImpl& get() const {
    if (!p_) [[unlikely]]
      fail(
          "an undefined tensor was used: it has no sizes, dtype or data. It may be a gradient that "
          "is not there (before backward, or of a sharded parameter of which this rank holds "
          "nothing), or a member that was never set");
    return *p_;
  }
  double item_double() const;
  int64_t item_int(int64_t least, int64_t most) const;

  Ref<TensorImpl> p_;
};

// ---- creation, not recorded
Tensor empty(const Dims& sizes, DType dtype = kFloat32, Device device = kCPU);  // unset bytes
// `value` as an operand for `op` on tensors of `dtype`: whole numbers stay exact. Error if the
// dtype has no room for it.
Tensor scalar_for(const char* op, double value, DType dtype);
Tensor full(const Dims& sizes, double value, DType dtype = kFloat32, Device device = kCPU);
Tensor zeros(const Dims& sizes, DType dtype = kFloat32, Device device = kCPU);
Tensor ones(const Dims& sizes, DType dtype = kFloat32, Device device = kCPU);
// A tensor over a Storage, with a view family of its own: offset and strides in elements.
Tensor over_storage(const Ref<Storage>& storage, const Dims& sizes, DType dtype,
                    int64_t offset = 0);
// A tensor with the values' dtype and the given sizes (default: one dimension).
template <class T>
Tensor tensor(std::span<const T> values, const Dims& sizes);
template <class T>
Tensor tensor(const std::vector<T>& values) {
  return tensor<T>(std::span<const T>(values), {int64_t(values.size())});
}
template <class T>
Tensor tensor(std::initializer_list<T> values) {
  return tensor<T>(std::span<const T>(values.begin(), values.size()), {int64_t(values.size())});
}
extern template Tensor tensor<float>(std::span<const float>, const Dims&);
extern template Tensor tensor<double>(std::span<const double>, const Dims&);
extern template Tensor tensor<int64_t>(std::span<const int64_t>, const Dims&);
extern template Tensor tensor<int32_t>(std::span<const int32_t>, const Dims&);
extern template Tensor tensor<uint8_t>(std::span<const uint8_t>, const Dims&);

// Raw copy between tensors of one shape, any strides and dtypes (a kernel call: not recorded,
// raises no version).
void copy_raw(const Tensor& to, const Tensor& from);
Tensor contiguous_raw(const Tensor& x);       // x itself, or a contiguous copy; no history
Tensor to_raw(const Tensor& x, DType dtype);  // likewise

// PyTorch's promotion: tensors with dimensions outrank 0-d tensors, those outrank numbers; then
// bool < int < float.
DType promote(std::span<const Tensor* const> inputs);

// ---- operators, recorded (defined in autograd/)
Tensor operator+(const Tensor& a, const Tensor& b);
Tensor operator-(const Tensor& a, const Tensor& b);
Tensor operator*(const Tensor& a, const Tensor& b);
Tensor operator/(const Tensor& a, const Tensor& b);
Tensor operator-(const Tensor& a);
Tensor operator<(const Tensor& a, const Tensor& b);
Tensor operator>(const Tensor& a, const Tensor& b);
Tensor operator<=(const Tensor& a, const Tensor& b);
Tensor operator>=(const Tensor& a, const Tensor& b);
Tensor operator==(const Tensor& a, const Tensor& b);
Tensor operator!=(const Tensor& a, const Tensor& b);
Tensor operator&(const Tensor& a, const Tensor& b);  // logical, of truth values
Tensor operator|(const Tensor& a, const Tensor& b);

}  // namespace sherd
