#include "core/embedding.h"

#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::Needs, autograd::record, autograd::Saved;

namespace {

// The gradient of a table [v, c] from that of its rows; can be differentiated again.
Tensor scatter_rows(const Tensor& g, const Tensor& ids, int64_t v, int64_t padding) {
  const int64_t c = g.size(-1);
  const Tensor gc = contiguous_raw(g), y = empty({v, c}, g.dtype(), g.device());
  if (y.numel())
    embedding_backward(g.device(), g.dtype())(
        gc.as_strided_raw({ids.numel(), c}, {c, 1}, gc.storage_offset()), ids, padding, false, y);
  return record<1>("embedding_backward", y, {&g},
                   [ids = Saved(ids), padding](const Tensor& gg, Needs) {
                     const Tensor i = ids.get(), rows = embedding(i, gg);
                     const Tensor is_padding = (i == Tensor(padding)).unsqueeze(-1);
                     return std::array{where(is_padding, Tensor(0.0), rows)};
                   });
}

}  // namespace

Tensor embedding(const Tensor& indices, const Tensor& weight, std::optional<int64_t> padding_idx) {
  autograd::refuse_placeholder("embedding", weight);
  if (weight.dim() != 2) fail("[embedding] weight must be [V, C], got shape ", weight.sizes());
  if (indices.dtype() != kInt64 && indices.dtype() != kInt32)
    fail("[embedding] indices must be int64 or int32, got ", indices.dtype());
  const int64_t v = weight.size(0), c = weight.size(1);
  int64_t padding = padding_idx.value_or(-1);
  if (padding_idx) {
    if (padding < -v || padding >= v)
      fail("[embedding] padding_idx ", padding, " is out of range for ", v, " rows");
    if (padding < 0) padding += v;
  }
  Dims sizes = indices.sizes();
  sizes.push(c);
  Tensor y = empty(sizes, weight.dtype(), weight.device());
  const Tensor ids = contiguous_raw(indices);
  if (y.numel()) embedding_forward(weight.device(), weight.dtype())(contiguous_raw(weight), ids, y);
  // The gradient needs no value of the weight: only its shape (FSDP need not gather it in
  // backward).
  return record<1>(
      "embedding", y, {&weight},
      [ids = Saved(ids), v, c, padding, dtype = weight.dtype()](const Tensor& g, Needs needs) {
        if (grad_enabled()) return std::array{scatter_rows(g, ids.get(), v, padding)};
        autograd::GradSink::Destination to = needs.destination(0, dtype);
        if (!to.tensor.defined()) to = {empty({v, c}, dtype, g.device()), false};
        const Tensor i = ids.get(), gc = contiguous_raw(g);
        if (to.tensor.numel())
          embedding_backward(g.device(), g.dtype())(
              gc.as_strided_raw({i.numel(), c}, {c, 1}, gc.storage_offset()), i, padding,
              to.accumulate, to.tensor);
        return std::array{to.tensor};
      });
}

}  // namespace sherd
