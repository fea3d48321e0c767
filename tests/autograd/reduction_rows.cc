// Rows of the reductions.
#include <algorithm>
#include <cmath>

#include "autograd/ops.h"
#include "tests/autograd/op_table.h"

namespace sherd::test {
namespace {

using List = std::vector<double>;

double total(const List& v) {
  long double s = 0;
  for (double x : v) s += x;
  return double(s);
}

// f(x, dims, keepdim), and its value for the list of the elements that are reduced to one.
template <class F, class V>
void add(std::vector<Row>& rows, const std::string& name, F f, V value, Row::Integers integers,
         const std::function<void(Row&)>& change = nullptr) {
  struct Form {
    std::string name;
    Dims dims;
    bool keep;
    std::vector<Dims> shapes;
    Dims large;
  };
  const Form forms[] = {
      {"", {}, false, {{2, 3}, {}, {1}, {5}, {2, 3, 4}, {70, 100}}, {300, 301}},
      {"_last", {-1}, false, {{2, 3}, {4}, {2, 3, 4}, {3, 5000}}, {130, 701}},
      {"_first", {0}, true, {{2, 3}, {4}, {2, 3, 4}, {5000, 3}}, {701, 130}},
      {"_middle", {1}, true, {{2, 3, 2}, {3, 1, 2}, {0, 3}, {7, 33, 65}}, {20, 100, 65}},
      {"_two", {0, -2}, false, {{2, 3, 2}, {2, 4, 1}, {3, 40, 17}}, {30, 40, 50}}};
  for (const Form& form : forms) {
    Row r;
    r.name = name + form.name;
    r.f = [f, form](const Inputs& t) { return f(t[0], form.dims, form.keep); };
    r.reference = [value, form](const Inputs& t) {
      const Tensor& x = t[0];
      bool reduced[kMaxDims] = {};
      for (auto d : form.dims) reduced[d < 0 ? d + x.dim() : d] = true;
      Dims kept, over, sizes;
      for (int i = 0; i < x.dim(); ++i) {
        const bool is_reduced = reduced[i] || form.dims.n == 0;
        kept.push(is_reduced ? 1 : x.size(i)), over.push(is_reduced ? x.size(i) : 1);
        if (!is_reduced || form.keep) sizes.push(is_reduced ? 1 : x.size(i));
      }
      const Tensor y = build(kept, [&](const Dims& i) {
        List v;
        for_each_index(over, [&](const Dims& j) {
          Dims index = i;
          for (int k = 0; k < index.n; ++k) index[k] += j[k];
          v.push_back(at(x, index));
        });
        return double(value(v));
      });
      return y.as_strided_raw(sizes, contiguous_strides(sizes), 0);
    };
    for (auto& s : form.shapes) r.samples.push_back({In(s, -2, 2)});
    r.large = {In(form.large, -2, 2)};
    r.integers = integers;
    r.tolerance = 4;
    r.refused = {[f] {
                   f(full({2, 3}, 1), {2}, false);
                 },
                 [f] {
                   f(full({2, 3}, 1), {0, -2}, false);
                 }};
    if (change) change(r);
    rows.push_back(r);
  }
}

}  // namespace

std::vector<Row> reduction_rows() {
  std::vector<Row> rows;
  add(
      rows, "sum", [](const Tensor& x, const Dims& d, bool k) { return sum(x, d, k); }, total,
      Row::kWide,
      [](Row& r) {
        r.samples.push_back({In({3, 0, 2}, 0, 1)});
      });
  add(
      rows, "mean", [](const Tensor& x, const Dims& d, bool k) { return mean(x, d, k); },
      [](const List& v) { return total(v) / double(v.size()); }, Row::kRefused);
  add(
      rows, "norm", [](const Tensor& x, const Dims& d, bool k) { return norm(x, d, k); },
      [](const List& v) {
        long double s = 0;
        for (double x : v) s += (long double)(x)*x;
        return double(std::sqrt(s));
      },
      Row::kRefused);
  add(
      rows, "amax", [](const Tensor& x, const Dims& d, bool k) { return amax(x, d, k); },
      [](const List& v) {
        double m = -INFINITY;
        for (double x : v) m = x != x || x > m ? x : m;
        return m;
      },
      Row::kStay, [](Row& r) { r.refused.push_back([] { amax(empty({0}), {}); }); });
  add(
      rows, "argmax", [](const Tensor& x, const Dims& d, bool k) { return argmax(x, d, k); },
      [](const List& v) {
        size_t best = 0;
        for (size_t i = 1; i < v.size(); ++i)
          if (v[best] == v[best] && (v[i] > v[best] || v[i] != v[i])) best = i;
        return double(best);
      },
      Row::kToIndex,
      [](Row& r) {
        r.differentiable = false, r.exact = true;
        r.refused.push_back([] { argmax(empty({0}), {}); });
      });
  for (double correction : {1.0, 0.0})
    add(
        rows, correction ? "var" : "var_biased",
        [correction](const Tensor& x, const Dims& d, bool k) { return var(x, d, correction, k); },
        [correction](const List& v) {
          const long double m = (long double)(total(v)) / v.size();
          long double s = 0;
          for (double x : v) s += (x - m) * (x - m);
          return double(s / std::max(0.0L, (long double)(v.size()) - correction));
        },
        Row::kRefused,
        [correction](Row& r) {
          // One element has no unbiased variance: NaN, as its derivative, which differences do not
          // see.
          if (correction)
            std::erase_if(r.samples, [&](const Sample& s) {
              return s[0].sizes.numel() <= 1 || s[0].sizes == Dims{3, 1, 2};
            });
        });
  return rows;
}

}  // namespace sherd::test
