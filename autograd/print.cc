// Text of tensors, laid out as PyTorch's repr: 4 digits, 80 columns, and of more than 1000 elements
// the three at each end of each dimension. Dtypes and ops have Sherd's names: float64, <add>.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>

#include "autograd/node.h"

namespace sherd {
namespace {

constexpr int64_t kSummarizeAbove = 1000, kEdge = 3;
constexpr size_t kColumns = 80;

Tensor first_dim_at(const Tensor& x, int64_t i) {
  return x.as_strided_raw(std::span(x.sizes()).subspan(1), std::span(x.strides()).subspan(1),
                          x.storage_offset() + i * x.stride(0));
}

bool is_cut(int64_t size, bool summarize) { return summarize && size > 2 * kEdge; }

// The indices of `size` that are shown; -1 stands for those left out.
std::vector<int64_t> shown_of(int64_t size, bool summarize) {
  std::vector<int64_t> indices;
  const bool cut = is_cut(size, summarize);
  for (int64_t i = 0; i < (cut ? kEdge : size); ++i) indices.push_back(i);
  if (!cut) return indices;
  indices.push_back(-1);
  for (int64_t i = size - kEdge; i < size; ++i) indices.push_back(i);
  return indices;
}

// Writes the elements of one tensor. T: double, or int64_t for integers and truth values.
template <class T>
class Printer {
 public:
  explicit Printer(const Tensor& x) : dtype_(x.dtype()), summarize_(x.numel() > kSummarizeAbove) {
    std::vector<T> shown;
    collect(x, shown);
    if constexpr (std::is_same_v<T, double>) choose_notation(shown);
    for (const T v : shown)
      if (std::is_same_v<T, int64_t> || (std::isfinite(double(v)) && v != 0))
        width_ = std::max(width_, text(v).size());
  }

  std::string print(const Tensor& x, size_t indent) const {
    if (x.dim() == 0) return text(values(x)[0]);
    std::string all;
    const auto add = [&](const std::string& text, const std::string& separator) {
      all += (all.empty() ? "[" : separator) + text;
    };
    const std::vector<int64_t> shown = shown_of(x.size(0), summarize_);
    const std::string margin(indent + 1, ' ');
    if (x.dim() == 1) {
      const std::vector<T> row = values(x);
      const size_t per_line =
          std::max<size_t>(1, (kColumns - std::min(kColumns, indent)) / (width_ + 2));
      auto value = row.begin();
      for (size_t i = 0; i < shown.size(); ++i)
        add(shown[i] < 0 ? " ..." : padded(text(*value++)),
            i % per_line == 0 ? ",\n" + margin : ", ");
    } else {
      for (const int64_t i : shown)
        add(i < 0 ? "..." : print(first_dim_at(x, i), indent + 1),
            "," + std::string(size_t(x.dim() - 1), '\n') + margin);
    }
    return all + "]";
  }

 private:
  // Those shown of a tensor of at most one dimension.
  std::vector<T> values(const Tensor& x) const {
    std::vector<T> all;
    const auto add = [&](const Tensor& part) {
      const Tensor y = to_raw(contiguous_raw(part), dtype_of<T>);
      all.insert(all.end(), y.template data<T>(), y.template data<T>() + y.numel());
    };
    const auto end = [&](int64_t from) {
      return x.as_strided_raw({kEdge}, x.strides(), x.storage_offset() + from * x.stride(0));
    };
    if (x.dim() == 0 || !is_cut(x.size(0), summarize_)) {
      add(x);
    } else {
      add(end(0));
      add(end(x.size(0) - kEdge));
    }
    return all;
  }

  void collect(const Tensor& x, std::vector<T>& to) const {
    if (x.dim() > 1) {
      for (const int64_t i : shown_of(x.size(0), summarize_))
        if (i >= 0) collect(first_dim_at(x, i), to);
      return;
    }
    const std::vector<T> shown = values(x);
    to.insert(to.end(), shown.begin(), shown.end());
  }

  void choose_notation(const std::vector<T>& shown) {
    double least = INFINITY, most = 0;
    for (const T v : shown) {
      if (!std::isfinite(double(v)) || v == 0) continue;
      least = std::min(least, std::abs(double(v))), most = std::max(most, std::abs(double(v)));
      whole_ = whole_ && double(v) == std::ceil(double(v));
    }
    scientific_ = most > 0 && (most / least > 1000 || most > 1e8 || least < 1e-4);
  }

  std::string text(T v) const {
    if constexpr (std::is_same_v<T, int64_t>) {
      return dtype_ == kBool ? (v ? "True" : "False") : std::to_string(v);
    } else {
      if (std::isnan(v)) return "nan";
      if (std::isinf(v)) return v > 0 ? "inf" : "-inf";
      char digits[32];
      std::snprintf(digits, sizeof digits, scientific_ ? "%.4e" : whole_ ? "%.0f." : "%.4f", v);
      return digits;
    }
  }
  std::string padded(const std::string& text) const {
    return std::string(width_ - std::min(width_, text.size()), ' ') + text;
  }

  DType dtype_;
  bool summarize_, whole_ = true, scientific_ = false;
  size_t width_ = 1;
};

std::string sizes_as_tuple(const Dims& sizes) {
  std::string text = "(";
  for (int i = 0; i < sizes.n; ++i) text += concat(i > 0 ? ", " : "", sizes[i]);
  return text + (sizes.n == 1 ? ",)" : ")");
}

}  // namespace

std::string to_string(const Tensor& tensor) {
  if (!tensor.defined()) return "tensor(undefined)";
  const bool has_values =
      !tensor.device().is_meta() && tensor.storage()->has_bytes() && !tensor.impl()->placeholder;
  std::string text = "tensor(";
  const size_t indent = text.size();
  if (!has_values)
    text += "...";
  else if (tensor.numel() == 0)
    text += "[]";
  else if (const Tensor x = tensor.detach().to(kCPU); is_float(x.dtype()))
    text += Printer<double>(x).print(x, indent);
  else
    text += Printer<int64_t>(x).print(x, indent);

  std::vector<std::string> facts;
  const DType dtype = tensor.dtype();
  if (!tensor.device().is_cpu()) facts.push_back(concat("device='", tensor.device(), "'"));
  if (!has_values || (tensor.numel() == 0 && tensor.dim() != 1))
    facts.push_back("size=" + sizes_as_tuple(tensor.sizes()));
  const bool is_usual = dtype == kFloat32 ||
                        (has_values && tensor.numel() > 0 && (dtype == kInt64 || dtype == kBool));
  if (!is_usual) facts.push_back(concat("dtype=", dtype));
  if (tensor.impl()->placeholder)
    facts.push_back("sharded");
  else if (!has_values && !tensor.device().is_meta())
    facts.push_back("released");
  const autograd::AutogradMeta* meta = autograd::meta_of(tensor);
  if (meta && meta->grad_fn)
    facts.push_back(concat("grad_fn=<", meta->grad_fn->op(), ">"));
  else if (tensor.requires_grad())
    facts.push_back("requires_grad=True");

  // As PyTorch counts columns, to break lines where it does.
  size_t column = text.size() - (text.find_last_of('\n') + 1) + 2;
  for (const std::string& fact : facts) {
    const bool fits = column + fact.size() + 2 <= kColumns;
    text += (fits ? ", " : ",\n" + std::string(indent, ' ')) + fact;
    column = (fits ? column + 2 : indent) + fact.size();
  }
  return text + ")";
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << to_string(tensor);
}

}  // namespace sherd
