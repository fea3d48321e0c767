// The CPU's gemm: layouts that the libraries take, blocks of 16-bit matrices converted to float32,
// and what is done to a block of the result while it is in the cache.
#include "core/gemm.h"

#include <bit>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/cpu/product.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// 16-bit matrices are converted in blocks of at most this many rows and columns: three of them, 3
// MiB of float32, stay near the processor, and a product of that size is still near its full rate.
constexpr int64_t kBlock = 512;
constexpr int64_t kFewRows = 16;

bool side_by_side(int64_t size, int64_t stride) { return stride == 1 || size == 1; }

// Whether the last two dimensions are a Matrix.
bool is_plain(const Tensor& t) {
  const int64_t rows = t.size(-2), columns = t.size(-1), r = t.stride(-2), c = t.stride(-1);
  return (side_by_side(columns, c) && (r >= columns || rows == 1)) ||
         (side_by_side(rows, r) && (c >= rows || columns == 1));
}
Matrix matrix(const Tensor& t, int64_t batch) {
  const int64_t rows = t.size(-2), columns = t.size(-1), r = t.stride(-2), c = t.stride(-1);
  char* data = t.bytes() + (t.dim() == 3 ? batch * t.stride(0) * size_of(t.dtype()) : 0);
  if (side_by_side(columns, c) && (r >= columns || rows == 1))
    return {data, rows, columns, std::max(r, columns), false};
  return {data, rows, columns, std::max(c, rows), true};
}
Matrix transpose(const Matrix& m) { return {m.data, m.columns, m.rows, m.ld, !m.transposed}; }

// What the results go through: bias and relu are done here where the product itself could not.
struct Call {
  DType in, out;
  bool accumulate, relu;
  const float* bias = nullptr;        // float32, for 16-bit and float32 results
  const double* wide_bias = nullptr;  // for float64
};

template <class T>
[[gnu::always_inline]] inline void finish_row(T* __restrict y, const T* __restrict bias, bool relu,
                                              int64_t n) {
  if (bias)
    for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
  if (relu)
    for (int64_t i = 0; i < n; ++i) y[i] = y[i] <= 0 ? 0 : y[i];
}
template <class T>
SHERD_AVX2 void finish_row_avx2(T* y, const T* bias, bool relu, int64_t n) {
  finish_row(y, bias, relu, n);
}
template <class T>
SHERD_AVX512 void finish_row_avx512(T* y, const T* bias, bool relu, int64_t n) {
  finish_row(y, bias, relu, n);
}
template <class T>
void finish(const Matrix& c, const T* bias, bool relu) {
  if (!bias && !relu) return;
  auto row = has_avx512() ? finish_row_avx512<T> : finish_row_avx2<T>;
  parallel_for(c.rows, std::max<int64_t>(1, 32768 / c.columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      row(reinterpret_cast<T*>(c.data) + i * c.ld, bias, relu, c.columns);
  });
}

void float_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  if (gemm_backend() == GemmBackend::kEigen) return eigen_product<float>(a, b, c, accumulate);
  onednn_product(a, b, c, accumulate);
}

// A contiguous copy of a matrix in float32, in the same order of its elements.
Matrix to_float(const Matrix& m, DType from, float* to) {
  const int64_t rows = m.transposed ? m.columns : m.rows, n = m.transposed ? m.rows : m.columns;
  const Convert f = convert(kFloat32, from);
  parallel_for(rows, std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      f(reinterpret_cast<char*>(to + i * n), sizeof(float), m.data + i * m.ld * size_of(from),
        size_of(from), n);
  });
  return {reinterpret_cast<char*>(to), m.rows, m.columns, n, m.transposed};
}
// y = bias and relu of c, or y += c, rounded to y's type.
void from_float(const Matrix& c, const Matrix& y, const Call& call, const float* bias) {
  if (!call.accumulate) finish(c, bias, call.relu);
  const Convert narrow = convert(call.out, kFloat32), widen = convert(kFloat32, call.out);
  const int64_t n = c.columns, bytes = size_of(call.out);
  auto add = has_avx512() ? finish_row_avx512<float> : finish_row_avx2<float>;
  parallel_for(c.rows, std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
    float before[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      float* row = reinterpret_cast<float*>(c.data) + i * c.ld;
      char* to = y.data + i * y.ld * bytes;
      if (call.accumulate) {
        widen(reinterpret_cast<char*>(before), sizeof(float), to, bytes, n);
        add(row, before, false, n);
      }
      narrow(to, bytes, reinterpret_cast<char*>(row), sizeof(float), n);
    }
  });
}

// A product of 16-bit matrices in float32.
void converted_product(const Matrix& a, const Matrix& b, const Matrix& y, const Call& call) {
  const int64_t M = y.rows, N = y.columns, K = a.columns;
  const int64_t m_block = std::min(M, kBlock), n_block = std::min(N, kBlock),
                k_block = std::min(K, kBlock);
  const bool direct = call.out == kFloat32;
  const Tensor scratch =
      empty({m_block * k_block + k_block * n_block + (direct ? 0 : m_block * n_block)}, kFloat32);
  float *as = scratch.data<float>(), *bs = as + m_block * k_block, *cs = bs + k_block * n_block;
  Matrix af{}, bf{};
  int64_t a_at[2] = {-1, -1}, b_at[2] = {-1, -1};  // which blocks af and bf are
  for (int64_t i = 0; i < M; i += m_block)
    for (int64_t j = 0; j < N; j += n_block) {
      const int64_t m = std::min(m_block, M - i), n = std::min(n_block, N - j);
      const Matrix yb = y.block(i, j, m, n, call.out);
      const Matrix c = direct ? yb : Matrix{reinterpret_cast<char*>(cs), m, n, n, false};
      for (int64_t k = 0; k < K; k += k_block) {
        const int64_t depth = std::min(k_block, K - k);
        if (a_at[0] != i || a_at[1] != k)
          af = to_float(a.block(i, k, m, depth, call.in), call.in, as), a_at[0] = i, a_at[1] = k;
        if (b_at[0] != k || b_at[1] != j)
          bf = to_float(b.block(k, j, depth, n, call.in), call.in, bs), b_at[0] = k, b_at[1] = j;
        float_product(af, bf, c, k > 0 || (direct && call.accumulate));
      }
      const float* bias = call.bias ? call.bias + j : nullptr;
      direct ? finish(c, bias, call.relu) : from_float(c, yb, call, bias);
    }
}

void product(const Matrix& a, const Matrix& b, const Matrix& y, const Call& call) {
  switch (call.in) {
    case kFloat64:
      eigen_product<double>(a, b, y, call.accumulate);
      return finish(y, call.wide_bias, call.relu);
    case kInt32:
      return eigen_product<uint32_t>(a, b, y, call.accumulate);
    case kInt64:
      return eigen_product<uint64_t>(a, b, y, call.accumulate);
    case kFloat32:
      // sgemm is a little faster than the primitive, and twice as fast for a few rows, but can do
      // no more than the product; the primitive spares a pass over a result that is large.
      if (gemm_backend() == GemmBackend::kOneDNN && (call.bias || call.relu) && y.rows >= kFewRows)
        return onednn_matmul(a, b, kFloat32, y, kFloat32, {call.bias, call.relu, false});
      float_product(a, b, y, call.accumulate);
      return finish(y, call.bias, call.relu);
    case kBFloat16:
      if (gemm_backend() == GemmBackend::kOneDNN && bf16_products() == Bf16Products::kNative)
        return onednn_matmul(a, b, kBFloat16, y, call.out, {call.bias, call.relu, call.accumulate});
      return converted_product(a, b, y, call);
    default:
      return converted_product(a, b, y, call);
  }
}

void gemm_cpu(const Stream&, const Tensor& a, const Tensor& b, const Tensor& y,
              const GemmOptions& options) {
  const bool post = options.bias.defined() || options.activation == Activation::kRelu;
  if (!is_plain(y) || (post && matrix(y, 0).transposed)) {
    const Tensor whole = empty(y.sizes(), y.dtype());
    if (options.accumulate) copy_raw(whole, y);
    gemm(a, b, whole, options);
    return copy_raw(y, whole);
  }
  const Tensor x = is_plain(a) ? a : contiguous_raw(a), w = is_plain(b) ? b : contiguous_raw(b);
  Tensor bias;
  Call call{a.dtype(), y.dtype(), options.accumulate, options.activation == Activation::kRelu};
  if (options.bias.defined()) {
    const bool wide = a.dtype() == kFloat64;
    bias = contiguous_raw(to_raw(options.bias, wide ? kFloat64 : kFloat32));
    wide ? void(call.wide_bias = bias.data<double>()) : void(call.bias = bias.data<float>());
  }
  const int64_t batch = y.dim() == 3 ? y.size(0) : 1;
  if (call.in == kBFloat16)
    bf16_products();  // measures, if it must, outside of the parallel region
  auto one = [&](int64_t i) {
    const Matrix c = matrix(y, i);
    if (c.transposed)
      product(transpose(matrix(w, i)), transpose(matrix(x, i)), transpose(c), call);
    else
      product(matrix(x, i), matrix(w, i), c, call);
  };
  // Many small products are shared out whole; a few large ones are cut by the library.
  if (batch >= 2 * num_threads() && num_threads() > 1)
    parallel_for(batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) one(i);
    });
  else
    for (int64_t i = 0; i < batch; ++i) one(i);
  if (options.activation != Activation::kRelu) apply_activation(options.activation, y);
}

const Register registered{gemm_kernel, DeviceType::kCPU, gemm_cpu};

}  // namespace

void native_bf16_product(const Tensor& x, const Tensor& w, const Tensor& y) {
  onednn_matmul(matrix(x, 0), matrix(w, 0), kBFloat16, matrix(y, 0), kBFloat16, {});
}
void converted_bf16_product(const Tensor& x, const Tensor& w, const Tensor& y) {
  converted_product(matrix(x, 0), matrix(w, 0), matrix(y, 0), {kBFloat16, kBFloat16, false, false});
}

}  // namespace sherd::cpu
