#include <algorithm>
#include <cstring>

#include "autograd/ops.h"
#include "autograd/pointwise.h"
#include "autograd/record.h"

namespace sherd {
using autograd::Needs, autograd::record;
namespace {

// Fills in a size of -1. Error if the elements do not fit.
Dims infer(const char* op, const Tensor& x, Dims sizes) {
  int unknown = -1;
  int64_t known = 1;
  bool is_too_large = false;
  for (int i = 0; i < sizes.n; ++i) {
    if (sizes[i] == -1) {
      if (unknown >= 0) fail("[", op, "] only one size can be -1, got ", sizes);
      unknown = i;
    } else if (sizes[i] < 0) {
      fail("[", op, "] a size is negative: ", sizes);
    } else {
      is_too_large |= __builtin_mul_overflow(known, sizes[i], &known);
    }
  }
  if (is_too_large && std::ranges::find(sizes, 0) != sizes.end()) known = 0, is_too_large = false;
  const bool fits = is_too_large  ? false
                    : unknown < 0 ? known == x.numel()
                                  : known > 0 && x.numel() % known == 0;
  if (!fits)
    fail("[", op, "] shape ", x.sizes(), " (", x.numel(), " elements) cannot become ", sizes);
  if (unknown >= 0) sizes[unknown] = x.numel() / known;
  return sizes;
}

// Strides of a view with these sizes; false if only a copy can have them.
bool view_strides(const Tensor& x, const Dims& sizes, Dims& strides) {
  strides = contiguous_strides(sizes);
  if (x.numel() == 0 || x.is_contiguous()) return true;
  int to = sizes.n - 1;
  int64_t chunk = 1, base = x.strides()[x.dim() - 1];  // a run of old dimensions that lie as one
  for (int i = x.dim() - 1; i >= 0; --i) {
    chunk *= x.sizes()[i];
    const bool ends = i == 0 || (x.sizes()[i - 1] != 1 && x.strides()[i - 1] != chunk * base);
    if (!ends) continue;
    int64_t filled = 1;
    while (to >= 0 && (filled < chunk || sizes[to] == 1)) {
      strides[to] = filled * base;
      filled *= sizes[to--];
    }
    if (filled != chunk) return false;
    if (i > 0) base = x.strides()[i - 1], chunk = 1;
  }
  return to < 0;
}

// [Note: views and in-place changes] A view's history says how it was cut from its base as that
// was. An in-place change gives the base another history, which the view does not get; so a
// backward through a view whose family was changed after it was taken is an error, and an in-place
// change through a view is one at once (autograd::check_in_place).
template <class F>
Tensor record_view(const char* op, const Tensor& x, const Dims& sizes, const Dims& strides,
                   int64_t offset, F gradient) {
  const Tensor y = x.as_strided_raw(sizes, strides, offset);
  y.impl()->is_view = true;
  if (x.is_leaf())
    return record<1>(op, y, {&x},
                     [gradient](const Tensor& g, Needs) { return std::array{gradient(g)}; });
  return record<1>(
      op, y, {&x},
      [gradient, op, family = x.family(), version = x.version()](const Tensor& g, Needs) {
        if (family->version != version)
          fail("[", op,
               "] the tensor that this is a view of was changed in place after the view was "
               "taken: make the change on a clone");
        return std::array{gradient(g)};
      });
}

Tensor make_view(const char* op, const Tensor& x, const Dims& sizes, const Dims& strides) {
  return record_view(op, x, sizes, strides, x.storage_offset(),
                     [from = x.sizes()](const Tensor& g) { return g.reshape(from); });
}

}  // namespace

Tensor Tensor::view(const Dims& s) const {
  const Dims sizes = infer("view", *this, s);
  Dims strides;
  if (!view_strides(*this, sizes, strides))
    fail("[view] shape ", this->sizes(), " with strides ", this->strides(), " cannot be seen as ",
         sizes, " without a copy: use reshape");
  return make_view("view", *this, sizes, strides);
}
Tensor Tensor::reshape(const Dims& s) const {
  const Dims sizes = infer("reshape", *this, s);
  Dims strides;
  if (view_strides(*this, sizes, strides)) return make_view("reshape", *this, sizes, strides);
  const Tensor c = contiguous();
  return make_view("reshape", c, sizes, contiguous_strides(sizes));
}
Tensor Tensor::flatten(int64_t start, int64_t end) const {
  const int a = wrap_dim("flatten", start, dim()), b = wrap_dim("flatten", end, dim());
  if (a > b) fail("[flatten] start dimension ", start, " comes after end dimension ", end);
  if (dim() == 0) return reshape({1});
  Dims s;
  for (int i = 0; i < dim(); ++i)
    if (i > a && i <= b)
      s[s.n - 1] *= size(i);
    else
      s.push(size(i));
  return reshape(s);
}
Tensor Tensor::transpose(int64_t a, int64_t b) const {
  const int i = wrap_dim("transpose", a, dim()), j = wrap_dim("transpose", b, dim());
  Dims s = sizes(), st = strides();
  if (dim() > 0) std::swap(s[i], s[j]), std::swap(st[i], st[j]);
  return record_view("transpose", *this, s, st, storage_offset(),
                     [i, j](const Tensor& g) { return g.transpose(i, j); });
}
Tensor Tensor::t() const {
  if (dim() > 2) fail("[t] expects a tensor with at most 2 dimensions, got shape ", sizes());
  return dim() < 2 ? *this : transpose(0, 1);
}
Tensor Tensor::permute(const Dims& dims) const {
  if (dims.n != dim())
    fail("[permute] ", dims, " does not name each of the ", dim(), " dimensions of ", sizes());
  Dims s = sizes(), st = strides(), inverse = dims;
  bool used[kMaxDims] = {};
  for (int i = 0; i < dims.n; ++i) {
    const int d = wrap_dim("permute", dims[i], dim());
    if (std::exchange(used[d], true))
      fail("[permute] dimension ", dims[i], " appears twice in ", dims);
    s[i] = sizes()[d], st[i] = strides()[d], inverse[d] = i;
  }
  return record_view("permute", *this, s, st, storage_offset(),
                     [inverse](const Tensor& g) { return g.permute(inverse); });
}
Tensor Tensor::expand(const Dims& to) const {
  Dims s = to, st = to;
  const int lead = to.n - dim();
  if (lead < 0) fail("[expand] shape ", sizes(), " cannot expand to fewer dimensions: ", to);
  for (int i = 0; i < to.n; ++i) {
    const bool is_new = i < lead;
    const int64_t mine = is_new ? 1 : sizes()[i - lead];
    if (to[i] == -1) {
      if (is_new) fail("[expand] -1 is not allowed for the new leading dimension ", i, " of ", to);
      s[i] = mine;
    } else if (to[i] < 0 || (mine != to[i] && mine != 1)) {
      fail("[expand] shape ", sizes(), " cannot expand to ", to);
    }
    st[i] = is_new || (mine == 1 && s[i] != 1) ? 0 : strides()[i - lead];
  }
  int64_t elements = size_of(dtype());
  bool is_too_large = false;
  for (int64_t n : s) is_too_large |= __builtin_mul_overflow(elements, n, &elements);
  if (is_too_large && std::ranges::find(s, 0) == s.end())
    fail("[expand] shape ", s, " is too large: it has more than 2^63 bytes");
  return record_view("expand", *this, s, st, storage_offset(),
                     [from = sizes()](const Tensor& g) { return sum_to(g, from); });
}
Tensor Tensor::squeeze() const {
  Dims s, st;
  for (int i = 0; i < dim(); ++i)
    if (size(i) != 1) s.push(size(i)), st.push(stride(i));
  return make_view("squeeze", *this, s, st);
}
Tensor Tensor::squeeze(int64_t d) const {
  const int k = wrap_dim("squeeze", d, dim());
  Dims s, st;
  for (int i = 0; i < dim(); ++i)
    if (i != k || size(i) != 1) s.push(size(i)), st.push(stride(i));
  return make_view("squeeze", *this, s, st);
}
Tensor Tensor::unsqueeze(int64_t d) const {
  const int k = wrap_dim("unsqueeze", d, dim() + 1);
  Dims s, st;
  for (int i = 0; i <= dim(); ++i) {
    if (i == k) s.push(1), st.push(i < dim() ? size(i) * stride(i) : 1);
    if (i < dim()) s.push(size(i)), st.push(stride(i));
  }
  return make_view("unsqueeze", *this, s, st);
}
Tensor Tensor::narrow(int64_t d, int64_t start, int64_t length) const {
  if (dim() == 0) fail("[narrow] a 0-d tensor has no dimension to narrow");
  const int k = wrap_dim("narrow", d, dim());
  if (start < 0) start += size(k);
  if (start < 0 || start > size(k) || length < 0 || length > size(k) - start)
    fail("[narrow] start ", start, " and length ", length, " leave dimension ", d, " of ", sizes());
  Dims s = sizes();
  s[k] = length;
  return record_view(
      "narrow", *this, s, strides(), storage_offset() + start * strides()[k],
      [from = sizes(), k, start, length](const Tensor& g) {
        Dims before = from, after = from;
        before[k] = start, after[k] = from[k] - start - length;
        return cat({zeros(before, g.dtype(), g.device()), g, zeros(after, g.dtype(), g.device())},
                   k);
      });
}
Tensor Tensor::select(int64_t d, int64_t index) const {
  if (dim() == 0) fail("[select] a 0-d tensor has no dimension to select from");
  const int k = wrap_dim("select", d, dim());
  if (index < -size(k) || index >= size(k))
    fail("[select] index ", index, " is out of range for dimension ", d, " of ", sizes());
  return narrow(k, index < 0 ? index + size(k) : index, 1).squeeze(k);
}

Tensor cat(const std::vector<Tensor>& in, int64_t dim) {
  if (in.empty()) fail("[cat] needs at least one tensor");
  // PyTorch lets an empty vector stand anywhere.
  auto is_nothing = [](const Tensor& t) { return t.dim() == 1 && t.numel() == 0; };
  std::vector<const Tensor*> promoted;
  const Tensor* first = nullptr;
  for (auto& t : in) {
    promoted.push_back(&t);
    if (t.dim() == 0) fail("[cat] a 0-d tensor cannot be joined: use stack");
    if (!first && !is_nothing(t)) first = &t;
  }
  if (!first) first = &in[0];
  const int k = wrap_dim("cat", dim, first->dim());
  Dims sizes = first->sizes();
  sizes[k] = 0;
  for (auto& t : in) {
    if (is_nothing(t)) continue;
    for (int i = 0; i < std::max(t.dim(), sizes.n); ++i)
      if (t.dim() != sizes.n || (i != k && t.size(i) != sizes[i]))
        fail("[cat] shapes ", first->sizes(), " and ", t.sizes(), " differ in more than dimension ",
             dim);
    if (t.device() != first->device())
      fail("[cat] tensors on different devices: ", first->device(), " and ", t.device());
    sizes[k] += t.size(k);
  }
  Tensor y = empty(sizes, promote(std::span<const Tensor* const>(promoted)), first->device());
  struct Part {
    int64_t length;  // along k; -1: an empty vector
    DType dtype;
  };
  std::vector<Part> parts;
  int64_t at = 0;
  for (auto& t : in) {
    parts.push_back({is_nothing(t) ? -1 : t.size(k), t.dtype()});
    if (t.numel() == 0) continue;
    copy_raw(y.as_strided_raw(t.sizes(), y.strides(), at * y.strides()[k]), t);
    at += t.size(k);
  }
  return autograd::record_many(
      "cat", {y}, in, [k, parts](std::span<const Tensor> g, autograd::Needs needs) {
        std::vector<Tensor> r(parts.size());
        int64_t at = 0;
        for (size_t i = 0; i < r.size(); at += std::max<int64_t>(0, parts[i++].length)) {
          if (!needs[int(i)]) continue;
          r[i] = parts[i].length < 0 ? zeros({0}, parts[i].dtype, g[0].device())
                                     : g[0].narrow(k, at, parts[i].length).to(parts[i].dtype);
        }
        return r;
      })[0];
}
Tensor stack(const std::vector<Tensor>& tensors, int64_t dim) {
  if (tensors.empty()) fail("[stack] needs at least one tensor");
  std::vector<Tensor> wide;
  const int k = wrap_dim("stack", dim, tensors[0].dim() + 1);
  for (auto& t : tensors) {
    if (!(t.sizes() == tensors[0].sizes()))
      fail("[stack] needs tensors of one shape, got ", tensors[0].sizes(), " and ", t.sizes());
    wide.push_back(t.unsqueeze(k));
  }
  return cat(wide, k);
}
std::vector<Tensor> split(const Tensor& x, const Dims& sizes, int64_t dim) {
  int64_t total = 0;
  for (auto s : sizes) total += s;
  if (total != x.size(dim))
    fail("[split] sizes ", sizes, " do not add up to dimension ", dim, " of ", x.sizes());
  std::vector<Tensor> r;
  int64_t at = 0;
  for (auto s : sizes) r.push_back(x.narrow(dim, at, s)), at += s;
  return r;
}
std::vector<Tensor> split(const Tensor& x, int64_t size, int64_t dim) {
  if (size <= 0 && x.size(dim) != 0) fail("[split] the size must be positive, got ", size);
  std::vector<Tensor> r;
  int64_t at = 0;
  do {
    const int64_t n = std::min(size, x.size(dim) - at);
    r.push_back(x.narrow(dim, at, n));
    at += size;
  } while (at < x.size(dim));
  return r;
}
std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int64_t dim) {
  if (chunks < 1) fail("[chunk] needs at least one chunk, got ", chunks);
  const int64_t n = x.size(dim);
  return split(x, std::max<int64_t>(1, (n + chunks - 1) / chunks), dim);
}

// ---- autograd's members of Tensor
bool Tensor::requires_grad() const {
  const autograd::AutogradMeta* m = autograd::meta_of(*this);
  return m && (m->requires_grad || m->grad_fn);
}
const Tensor& Tensor::set_requires_grad(bool on) const {
  if (on && !is_float(dtype()))
    fail("[requires_grad_] only a floating point tensor can require a gradient, not ", dtype());
  if (autograd::AutogradMeta* m = autograd::meta_of(*this); m && m->grad_fn && !on)
    fail("[requires_grad_] the result of an op cannot stop requiring a gradient: use detach()");
  if (on || autograd::meta_of(*this)) {
    autograd::AutogradMeta& m = autograd::make_meta(*this);
    if (!m.grad_fn) m.requires_grad = on;
  }
  return *this;
}
Tensor& Tensor::requires_grad_(bool on) {
  set_requires_grad(on);
  return *this;
}
bool Tensor::is_leaf() const {
  const autograd::AutogradMeta* m = autograd::meta_of(*this);
  return !m || !m->grad_fn;
}
Tensor Tensor::grad() const {
  const autograd::AutogradMeta* m = autograd::meta_of(*this);
  return m ? m->grad : Tensor();
}
void Tensor::set_grad(const Tensor& g) const {
  if (!g.defined()) {
    if (autograd::AutogradMeta* m = autograd::meta_of(*this)) m->grad = {};
    return;
  }
  if (!(g.sizes() == sizes()))
    fail("[set_grad] the gradient's shape ", g.sizes(), " is not the tensor's ", sizes());
  if (!is_float(g.dtype()))  // of a lower precision than the tensor's it may be
    fail("[set_grad] the gradient is ", g.dtype(), ": expected a floating point dtype");
  if (g.device() != device() && !device().is_meta())  // a declared parameter's may come first
    fail("[set_grad] the gradient is on ", g.device(), ", and the tensor on ", device());
  autograd::make_meta(*this).grad = g;
}

}  // namespace sherd
