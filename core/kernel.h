// Kernel<void(A...)>: the typed slot of one operator, an entry a device type. The device's own file
// fills it:
//
//     // the declaration, seen by all
//     inline constinit Kernel<void(const Tensor& x, Tensor& y)> relu_kernel{"relu"};
//     // cpu/relu.cc
//     static const Register r{relu_kernel, DeviceType::kCPU,
//                             [](const Stream&, const Tensor& x, Tensor& y) { ... }};
//     // use
//     relu_kernel(x.device(), x.dtype())(x, y);
//
// A function of another signature does not compile; a missing one throws an Error with op, device
// and dtype. A kernel gets the stream to run on first; what it computes is there only for later
// work on that stream. On the meta device a call does nothing: shapes are the caller's.
#pragma once
#include "core/stream.h"
#include "core/tensor.h"

namespace sherd {

template <class F>
class Kernel;
template <class... A>
class Kernel<void(A...)> {
 public:
  using Function = void (*)(const Stream&, A...);

  constexpr explicit Kernel(const char* op) : op_(op) {}
  // The device's kernel, bound to the current stream.
  auto operator()(Device device, DType dtype) const {
    Function f = nullptr;
    if (!device.is_meta()) {
      f = functions_[int(device.type)];
      if (!f) [[unlikely]]
        fail("[", op_, "] has no ", to_string(device), " kernel (dtype ", name_of(dtype), ")");
    }
    return [f, stream = current_stream(device)](A... a) {
      if (f) f(stream, static_cast<A>(a)...);
    };
  }
  void set(DeviceType d, Function f) { functions_[int(d)] = f; }
  bool has(DeviceType d) const { return functions_[int(d)]; }

 private:
  const char* op_;
  Function functions_[kDeviceTypes] = {};
};

// Static registration. The Bazel library that holds it needs alwayslink = True, or the linker
// leaves it out.
struct Register {
  template <class... A>
  Register(Kernel<void(A...)>& k, DeviceType d,
           std::type_identity_t<void (*)(const Stream&, A...)> f) {
    k.set(d, f);
  }
};

}  // namespace sherd
