#include <dnnl.hpp>
#include <exception>
#include <unordered_map>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/cpu/product.h"
#include "core/parallel_for.h"
#include "core/tensor.h"

namespace sherd::cpu {
namespace {

// oneDNN takes as many threads as OpenMP would give the calling thread, a number of its own for
// each thread of the process. Returns the number.
int enter_onednn() {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  if (omp_get_max_threads() != num_threads()) omp_set_num_threads(num_threads());
#endif
  return num_threads();
}

dnnl::engine& engine() {
  static dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

struct Key {
  int64_t m, n, k, lda, ldb, ldc;
  DType in, out;
  bool a_transposed, b_transposed, bias, relu, accumulate;
  int threads;
  bool operator==(const Key&) const = default;
};
struct HashKey {
  size_t operator()(const Key& k) const {
    uint64_t h = 0;
    for (uint64_t x :
         {uint64_t(k.m), uint64_t(k.n), uint64_t(k.k), uint64_t(k.lda), uint64_t(k.ldb),
          uint64_t(k.ldc),
          uint64_t(int(k.in) | int(k.out) << 4 | k.a_transposed << 8 | k.b_transposed << 9 |
                   k.bias << 10 | k.relu << 11 | k.accumulate << 12) |
              uint64_t(k.threads) << 16})
      h = (h ^ x) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
    return h;
  }
};

struct Primitive {
  dnnl::matmul matmul;
  std::unordered_map<int, dnnl::memory> arguments;
  int64_t scratch_bytes;
};

dnnl::memory::data_type type_of(DType d) {
  return d == kBFloat16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

Primitive make(const Key& key) {
  using Desc = dnnl::memory::desc;
  auto describe = [](int64_t rows, int64_t columns, int64_t ld, bool transposed, DType t) {
    return Desc({rows, columns}, type_of(t),
                transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1});
  };
  const Desc a = describe(key.m, key.k, key.lda, key.a_transposed, key.in),
             b = describe(key.k, key.n, key.ldb, key.b_transposed, key.in),
             c = describe(key.m, key.n, key.ldc, false, key.out),
             bias({1, key.n}, dnnl::memory::data_type::f32, dnnl::memory::dims{key.n, 1});
  dnnl::post_ops post;
  if (key.accumulate) post.append_sum(1);
  if (key.relu) post.append_eltwise(1, dnnl::algorithm::eltwise_relu, 0, 0);
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(post);
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto plan =
      key.bias
          ? dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, bias, c), attributes, engine())
          : dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine());
  Primitive p;
  p.matmul = dnnl::matmul(plan);
  p.scratch_bytes = int64_t(plan.scratchpad_desc().get_size());
  auto argument = [&](int name, const Desc& d) {
    p.arguments.emplace(name, dnnl::memory(d, engine(), nullptr));
  };
  argument(DNNL_ARG_SRC, a);
  argument(DNNL_ARG_WEIGHTS, b);
  argument(DNNL_ARG_DST, c);
  if (key.bias) argument(DNNL_ARG_BIAS, bias);
  argument(DNNL_ARG_SCRATCHPAD, plan.scratchpad_desc());
  return p;
}

}  // namespace

void onednn_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  enter_onednn();
  auto floats = [](const Matrix& m) { return reinterpret_cast<float*>(m.data); };
  const auto status =
      dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', c.rows, c.columns, a.columns,
                 1, floats(a), a.ld, floats(b), b.ld, accumulate ? 1 : 0, floats(c), c.ld);
  if (status != dnnl_success) fail("[gemm] oneDNN's sgemm failed with status ", int(status));
}

void onednn_matmul(const Matrix& a, const Matrix& b, DType in, const Matrix& c, DType out,
                   const PostOps& post) {
  // Making a primitive takes a hundred times as long as a small product. They hold the pointers of
  // the call, so each thread has its own.
  constexpr size_t kMostPrimitives = 1024;
  thread_local std::unordered_map<Key, Primitive, HashKey> primitives;
  thread_local dnnl::stream stream(engine());
  const Key key{c.rows,
                c.columns,
                a.columns,
                a.ld,
                b.ld,
                c.ld,
                in,
                out,
                a.transposed,
                b.transposed,
                post.bias != nullptr,
                post.relu,
                post.accumulate,
                enter_onednn()};
  auto it = primitives.find(key);
  if (it == primitives.end()) {
    if (primitives.size() >= kMostPrimitives) primitives.clear();
    try {
      it = primitives.emplace(key, make(key)).first;
    } catch (const dnnl::error& e) {
      fail("[gemm] oneDNN has no product of ", in, " matrices on this processor (", e.message, ")");
    }
  }
  Primitive& p = it->second;
  auto set = [&](int name, const void* data) {
    p.arguments.at(name).set_data_handle(const_cast<void*>(data));
  };
  set(DNNL_ARG_SRC, a.data);
  set(DNNL_ARG_WEIGHTS, b.data);
  set(DNNL_ARG_DST, c.data);
  if (post.bias) set(DNNL_ARG_BIAS, post.bias);
  const Tensor scratch = empty({p.scratch_bytes}, kUInt8);
  set(DNNL_ARG_SCRATCHPAD, scratch.bytes());
  p.matmul.execute(stream, p.arguments);
  stream.wait();
}

bool onednn_has_bf16() {
  static const bool yes = [] {
    try {
      make({64, 64, 64, 64, 64, 64, kBFloat16, kBFloat16, false, false, false, false, false, 1});
      return true;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return yes;
}

}  // namespace sherd::cpu
