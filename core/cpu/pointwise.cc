#include "core/cpu/pointwise.h"

#include "core/cpu/convert.h"
#include "core/parallel_for.h"

namespace sherd::cpu {

static constexpr int64_t kGrain =
    32768;  // elements a piece: the cut does not depend on the number of threads
static constexpr int64_t kBlock =
    1024;  // elements converted at a time: all blocks of an operator stay in the first level cache
static constexpr int64_t kLongRow =
    256;  // rows at least this long are worked on one by one, without copying dense operands

// f(pointer, stride, count, done): the runs of the innermost dimension that make up [begin, begin +
// n) of operand k.
template <class F>
static void for_runs(const Strided& s, int k, int64_t begin, int64_t n, F f) {
  const auto& o = s.operands[k];
  int64_t index[kMaxDims], rest = begin;
  char* p = o.data;
  for (int d = 0; d < s.ndim; ++d)
    index[d] = rest % s.sizes[d], rest /= s.sizes[d], p += index[d] * o.strides[d];
  for (int64_t done = 0; done < n;) {
    int64_t m = std::min(n - done, s.sizes[0] - index[0]);
    f(p, o.strides[0], m, done);
    done += m, p += m * o.strides[0], index[0] += m;
    for (int d = 0; d + 1 < s.ndim && index[d] == s.sizes[d]; ++d)
      p += o.strides[d + 1] - index[d] * o.strides[d], index[d] = 0, ++index[d + 1];
  }
}

void run(const Strided& s, DType result, const void* op, Loop loop) {
  bool dense = s.dense(0, result);
  for (int k = 1; k < s.n; ++k) dense = dense && s.dense(k, s.compute);
  if (dense) {
    parallel_for(s.numel, kGrain, [&](int64_t begin, int64_t end) {
      const void* in[Strided::kMaxOperands];
      for (int k = 1; k < s.n; ++k) in[k - 1] = s.operands[k].data + begin * size_of(s.compute);
      loop(op, s.operands[0].data + begin * size_of(result), in, end - begin);
    });
    return;
  }
  const bool rows = s.sizes[0] >= kLongRow;
  Convert from[Strided::kMaxOperands], to = convert(s.operands[0].dtype, result);
  bool direct[Strided::kMaxOperands];
  for (int k = 0; k < s.n; ++k) {
    DType t = k ? s.compute : result;
    from[k] = convert(s.compute, s.operands[k].dtype);
    direct[k] =
        (rows || s.ndim == 1) && s.operands[k].dtype == t && s.operands[k].strides[0] == size_of(t);
  }
  parallel_for(s.numel, kGrain, [&](int64_t begin, int64_t end) {
    alignas(64) char block[Strided::kMaxOperands][kBlock * 8];
    for (int k = 1; k < s.n; ++k)
      if (s.operands[k].uniform)
        from[k](block[k], size_of(s.compute), s.operands[k].data, 0, std::min(kBlock, end - begin));
    for (int64_t i = begin, n; i < end; i += n) {
      n = std::min(kBlock, end - i);
      if (rows) n = std::min(n, s.sizes[0] - i % s.sizes[0]);
      const void* in[Strided::kMaxOperands];
      for (int k = 1; k < s.n; ++k) {
        in[k - 1] = block[k];
        if (s.operands[k].uniform) continue;
        if (direct[k])
          for_runs(s, k, i, n, [&](char* p, int64_t, int64_t, int64_t) { in[k - 1] = p; });
        else
          for_runs(s, k, i, n, [&](char* p, int64_t stride, int64_t m, int64_t done) {
            from[k](block[k] + done * size_of(s.compute), size_of(s.compute), p, stride, m);
          });
      }
      void* out = block[0];
      if (direct[0]) for_runs(s, 0, i, n, [&](char* p, int64_t, int64_t, int64_t) { out = p; });
      loop(op, out, in, n);
      if (!direct[0])
        for_runs(s, 0, i, n, [&](char* p, int64_t stride, int64_t m, int64_t done) {
          to(p, stride, block[0] + done * size_of(result), size_of(result), m);
        });
    }
  });
}

}  // namespace sherd::cpu
