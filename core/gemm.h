// Matrix products on raw tensors, the one way to oneDNN (or Eigen) on the CPU.
//
//     gemm(x, w.t(), y);                                            // y = x w^T
//     gemm(x, w.t(), y, {.bias = b, .activation = Activation::kRelu});   // y = relu(x w^T + b)
//     gemm(g.t(), x, dw, {.accumulate = true});                     // dw += g^T x
//
// Legend: M rows, N columns, K summed over, B batch.
#pragma once
#include <string>

#include "core/kernel.h"

namespace sherd {

enum class Activation : uint8_t { kNone, kRelu, kGelu, kGeluTanh };

struct GemmOptions {
  bool accumulate = false;  // y += a b; excludes bias and activation
  Tensor bias = {};         // [N], of any floating point dtype; undefined: none
  Activation activation = Activation::kNone;
};

// y = activation(a b + bias), or y += a b.
//   a [M, K], b [K, N], y [M, N]; or with a batch: a [B, M, K], b [B, K, N], y [B, M, N], where a
//   batch of a or b may be expanded (stride 0).
//   Strides: any. Fast where one of a matrix's two strides is 1 (else a copy is made).
//   dtypes: a and b alike; float32, bfloat16 and float16 (both summed in float32), float64, int32,
//   int64. y has the same dtype, or float32 for bfloat16 and float16 inputs.
//   K = 0 gives zeros (plus bias); y must not overlap a or b.
// Checks shapes and dtypes (Error); on the meta device it does nothing more.
void gemm(const Tensor& a, const Tensor& b, const Tensor& y, const GemmOptions& options = {});

// y = activation(y), in place: what a kernel calls that cannot apply it inside the product.
void apply_activation(Activation activation, const Tensor& y);

// The slot behind gemm(): arguments are checked, none of the sizes is 0.
inline constinit Kernel<void(const Tensor& a, const Tensor& b, const Tensor& y,
                             const GemmOptions& options)>
    gemm_kernel{"gemm"};

// ---- the CPU's libraries
// oneDNN, or Eigen as the portable fallback. Starts as what the environment variable SHERD_GEMM
// says (onednn or eigen), else oneDNN. float64 and integers are always Eigen's.
enum class GemmBackend : uint8_t { kOneDNN, kEigen };
GemmBackend gemm_backend();
void set_gemm_backend(GemmBackend backend);

// How bfloat16 products are computed: natively, or converted to float32 a block at a time inside
// the product. Processors differ in which is faster, and the bits differ, so the choice is
// explicit:
//   kAuto measures both rates once (some milliseconds), keeps them in
//   $XDG_CACHE_HOME/sherd/bf16_products.txt (default ~/.cache/sherd), a line a processor model, and
//   is from then on kNative or kConverted.
// Starts as what the environment variable SHERD_BF16 says (auto, native or converted), else kAuto.
// In distributed runs rank 0 decides for all, when FSDP or DDP wraps a model that computes in
// bfloat16.
enum class Bf16Products : uint8_t { kAuto, kNative, kConverted };
Bf16Products bf16_products();  // kNative or kConverted: resolves kAuto, measuring if it must
void set_bf16_products(Bf16Products choice);
bool has_native_bf16_products();  // this processor
// "native bf16: 310 GFLOP/s, converted: 160 GFLOP/s on one thread (native is used)", or "native
// bf16 (set)".
std::string describe_bf16_products();
const char* name_of(Bf16Products choice);

}  // namespace sherd
