// Rows of the ops that view, copy, join and cut.
#include "autograd/ops.h"
#include "tests/autograd/op_table.h"

namespace sherd::test {
namespace {

using Map = std::function<Dims(const Dims& index)>;

// A row of a view: `from` gives the input's index for an index of the result, which has shape
// to(x.sizes()).
Row view(std::string name, Function f, std::function<Dims(const Dims&)> to,
         std::function<Dims(const Dims& sizes, const Dims& index)> from, std::vector<Dims> shapes,
         std::vector<std::function<void()>> refused = {}) {
  Row r;
  r.name = std::move(name);
  r.f = std::move(f);
  r.reference = [to, from](const Inputs& t) {
    const Dims sizes = t[0].sizes();
    return build(to(sizes), [&](const Dims& i) { return at(t[0], from(sizes, i)); });
  };
  for (auto& s : shapes) r.samples.push_back({In(s, -2, 2)});
  r.is_view = r.exact = true;
  r.integers = Row::kStay;
  r.refused = std::move(refused);
  return r;
}

// The index of shape `sizes` at the same place in row-major order as `index` of shape `other`.
Dims same_place(const Dims& sizes, const Dims& other, const Dims& index) {
  int64_t place = 0;
  for (int i = 0; i < index.n; ++i) place = place * other[i] + index[i];
  Dims r = sizes;
  for (int i = sizes.n - 1; i >= 0; --i) r[i] = place % sizes[i], place /= sizes[i];
  return r;
}
Row shaped(std::string name, Function f, std::function<Dims(const Dims&)> to,
           std::vector<Dims> shapes, std::vector<std::function<void()>> refused = {}) {
  return view(
      std::move(name), std::move(f), to,
      [to](const Dims& s, const Dims& i) { return same_place(s, to(s), i); }, std::move(shapes),
      std::move(refused));
}

template <class... D>
std::function<Dims(const Dims&)> always(D... d) {
  return [=](const Dims&) { return Dims{int64_t(d)...}; };
}
Dims without(const Dims& d, int k) {
  Dims r;
  for (int i = 0; i < d.n; ++i)
    if (i != k) r.push(d[i]);
  return r;
}
Dims inserted(const Dims& d, int k, int64_t value) {
  Dims r;
  for (int i = 0; i <= d.n; ++i) {
    if (i == k) r.push(value);
    if (i < d.n) r.push(d[i]);
  }
  return r;
}
Tensor square() { return full({2, 3}, 1); }
// All pieces in one row of elements, each by a factor of its own.
Tensor weighed(const std::vector<Tensor>& pieces) {
  std::vector<Tensor> flat;
  for (auto& p : pieces) flat.push_back((p * int(flat.size() + 1)).reshape({-1}));
  return cat(flat);
}

}  // namespace

std::vector<Row> view_rows() {
  std::vector<Row> rows{
      shaped(
          "view",
          [](const Inputs& t) {
            return t[0].contiguous().view({3, -1});
          },
          [](const Dims& s) {
            return Dims{3, s.numel() / 3};
          },
          {{2, 3}, {6}, {3, 1, 4}, {0, 3}},
          {[] { square().view({4}); },
           [] {
             square().view({-1, -1});
           },
           [] {
             square().view({-1, 4});
           },
           [] {
             square().view({-2, 3});
           },
           [] { square().t().view({6}); },
           [] {
             empty({0}).view({0, -1});
           }}),
      shaped(
          "reshape",
          [](const Inputs& t) {
            return t[0].reshape({2, -1, 1});
          },
          [](const Dims& s) {
            return Dims{2, s.numel() / 2, 1};
          },
          {{2, 3}, {6}, {4, 1, 3}, {2, 0}}, {[] {
            square().reshape({4, 2});
          }}),
      shaped(
          "flatten", [](const Inputs& t) { return t[0].flatten(1); },
          [](const Dims& s) {
            return Dims{s[0], s.numel() / s[0]};
          },
          {{2, 3}, {2, 3, 2}, {3, 1, 2, 2}, {2, 0, 3}},
          {[] { square().flatten(1, 0); }, [] { square().flatten(2); }}),
      shaped(
          "squeeze", [](const Inputs& t) { return t[0].squeeze(); },
          [](const Dims& s) {
            Dims r;
            for (auto x : s)
              if (x != 1) r.push(x);
            return r;
          },
          {{2, 1, 3}, {1}, {}, {1, 1}, {0, 1}}),
      shaped(
          "squeeze_dim", [](const Inputs& t) { return t[0].squeeze(-2); },
          [](const Dims& s) { return s[s.n - 2] == 1 ? without(s, s.n - 2) : s; },
          {{2, 1, 3}, {2, 3}, {1, 1}, {1, 0}}, {[] { square().squeeze(2); }}),
      shaped(
          "unsqueeze", [](const Inputs& t) { return t[0].unsqueeze(-2); },
          [](const Dims& s) { return inserted(s, s.n - 1, 1); }, {{2, 3}, {4}, {2, 1, 3}, {0, 2}},
          {[] { square().unsqueeze(3); }, [] { square().unsqueeze(-4); }}),
      view(
          "transpose", [](const Inputs& t) { return t[0].transpose(0, -1); },
          [](const Dims& s) {
            Dims r = s;
            std::swap(r.d[0], r.d[r.n - 1]);
            return r;
          },
          [](const Dims&, const Dims& i) {
            Dims r = i;
            std::swap(r.d[0], r.d[r.n - 1]);
            return r;
          },
          {{2, 3}, {4}, {2, 3, 4}, {0, 3}, {40, 50}}, {[] { square().transpose(0, 2); }}),
      view(
          "t", [](const Inputs& t) { return t[0].t(); },
          [](const Dims& s) {
            return s.n < 2 ? s : Dims{s[1], s[0]};
          },
          [](const Dims&, const Dims& i) {
            return i.n < 2 ? i : Dims{i[1], i[0]};
          },
          {{2, 3}, {4}, {}, {3, 0}}, {[] {
            full({1, 2, 3}, 1).t();
          }}),
      view(
          "permute",
          [](const Inputs& t) {
            return t[0].permute({2, 0, -2});
          },
          [](const Dims& s) {
            return Dims{s[2], s[0], s[1]};
          },
          [](const Dims&, const Dims& i) {
            return Dims{i[1], i[2], i[0]};
          },
          {{2, 3, 4}, {1, 2, 1}, {2, 0, 3}, {20, 30, 40}},
          {[] {
             square().permute({0, 0});
           },
           [] { square().permute({0}); },
           [] {
             square().permute({0, 2});
           }}),
      view(
          "expand",
          [](const Inputs& t) {
            return t[0].expand({2, -1, 4});
          },
          [](const Dims& s) {
            return Dims{2, s[s.n - 2], 4};
          },
          [](const Dims& s, const Dims& i) {
            Dims r = tail(i, s.n);
            for (int k = 0; k < r.n; ++k)
              if (s[k] == 1) r[k] = 0;
            return r;
          },
          {{3, 1}, {3, 4}, {1, 3, 1}, {2, 3, 4}, {0, 1}},
          {[] { square().expand({3}); },
           [] {
             square().expand({4, 3});
           },
           [] {
             square().expand({-1, 2, 3});
           }}),
      view(
          "narrow", [](const Inputs& t) { return t[0].narrow(-1, 1, 2); },
          [](const Dims& s) { return with(s, s.n - 1, 2); },
          [](const Dims&, const Dims& i) { return with(i, i.n - 1, i[i.n - 1] + 1); },
          {{2, 4}, {3}, {2, 3, 4}, {0, 3}},
          {[] { square().narrow(1, 2, 2); }, [] { square().narrow(0, -3, 1); },
           [] { square().narrow(0, 0, -1); }, [] { square().narrow(2, 0, 1); },
           [] { full({}, 1).narrow(0, 0, 1); }}),
      view(
          "select", [](const Inputs& t) { return t[0].select(1, -1); },
          [](const Dims& s) { return without(s, 1); },
          [](const Dims& s, const Dims& i) { return inserted(i, 1, s[1] - 1); },
          {{2, 3}, {3, 1}, {2, 3, 4}, {0, 2}},
          {[] { square().select(0, 2); }, [] { square().select(0, -3); },
           [] { square().select(2, 0); }, [] { full({}, 1).select(0, 0); }}),
  };
  for (auto& r : rows) {
    r.large = r.samples.back();
    // These copy where they must.
    if (r.name == "reshape" || r.name == "flatten" || r.name == "view") r.is_view = false;
  }

  Row contiguous = view(
      "contiguous", [](const Inputs& t) { return t[0].contiguous(); },
      [](const Dims& s) { return s; }, [](const Dims&, const Dims& i) { return i; },
      {{2, 3}, {}, {0}, {2, 3, 4}, {130, 70}});
  rows.push_back(contiguous);

  Row join;
  join.name = "cat";
  join.f = [](const Inputs& t) { return cat(t, -1); };
  join.reference = [](const Inputs& t) {
    Dims sizes = t[0].sizes();
    sizes[sizes.n - 1] = 0;
    for (auto& x : t) sizes[sizes.n - 1] += x.size(-1);
    return build(sizes, [&](const Dims& i) {
      int64_t j = i[i.n - 1];
      size_t k = 0;
      while (j >= t[k].size(-1)) j -= t[k++].size(-1);
      return at(t[k], with(i, i.n - 1, j));
    });
  };
  join.samples = {{{2, 3}, {2, 1}, {2, 2}},
                  {{3}, {0}, {2}},
                  {{2, 3}},
                  {{2, 0}, {2, 0}},
                  {{2, 2, 3}, {2, 2, 2}}};
  join.large = {{130, 70}, {130, 80}};
  join.exact = true;
  join.integers = Row::kStay;
  join.refused = {[] { cat({}); },
                  [] {
                    cat({square(), full({3, 2}, 1)}, 1);
                  },
                  [] { cat({square()}, 2); }, [] { cat({full({}, 1)}); },
                  [] {
                    cat({square(), full({2}, 1)});
                  }};
  rows.push_back(join);

  Row pile;
  pile.name = "stack";
  pile.f = [](const Inputs& t) { return stack(t, 1); };
  pile.reference = [](const Inputs& t) {
    return build(inserted(t[0].sizes(), 1, int64_t(t.size())),
                 [&](const Dims& i) { return at(t[size_t(i[1])], without(i, 1)); });
  };
  pile.samples = {{{2, 3}, {2, 3}, {2, 3}}, {{4}, {4}}, {{2, 0}, {2, 0}}, {{3, 1, 2}}};
  pile.large = {{130, 70}, {130, 70}};
  pile.exact = true;
  pile.integers = Row::kStay;
  pile.refused = {[] { stack({}); },
                  [] {
                    stack({square(), full({3, 2}, 1)});
                  },
                  [] { stack({square()}, 3); }};
  rows.push_back(pile);

  // Pieces along dimension 1, each weighed by its number.
  struct Cut {
    std::string name;
    std::function<std::vector<Tensor>(const Tensor&)> f;
    std::function<Dims(int64_t n)> lengths;
    std::vector<std::function<void()>> refused;
  };
  auto every = [](int64_t step) {
    return [step](int64_t n) {
      Dims d;
      for (int64_t i = 0; i < n; i += step) d.push(std::min(step, n - i));
      return d;
    };
  };
  const Cut cuts[] = {
      {"split",
       [](const Tensor& x) { return split(x, 2, 1); },
       every(2),
       {[] { split(square(), 0); }, [] { split(square(), -1); }, [] { split(square(), 1, 2); }}},
      {"split_sizes",
       [](const Tensor& x) {
         return split(x, Dims{1, x.size(1) - 1}, 1);
       },
       [](int64_t n) {
         return Dims{1, n - 1};
       },
       {[] {
          split(square(), Dims{1, 2});
        },
        [] {
          split(square(), Dims{3, -1});
        }}},
      {"chunk",
       [](const Tensor& x) { return chunk(x, 3, 1); },
       [every](int64_t n) { return every((n + 2) / 3)(n); },
       {[] { chunk(square(), 0); }}}};
  for (const Cut& c : cuts) {
    Row r;
    r.name = c.name;
    r.f = [c](const Inputs& t) { return weighed(c.f(t[0])); };
    r.reference = [c](const Inputs& t) {
      const Tensor& x = t[0];
      std::vector<double> v;
      int64_t begin = 0;
      double factor = 1;
      for (int64_t n : c.lengths(x.size(1))) {
        for_each_index(with(x.sizes(), 1, n), [&](const Dims& i) {
          v.push_back(at(x, with(i, 1, i[1] + begin)) * factor);
        });
        begin += n, factor += 1;
      }
      return tensor<double>(v);
    };
    r.samples = {{{2, 5}}, {{2, 4, 2}}, {{3, 2}}, {{0, 3}}};
    r.large = {{130, 7}};
    r.exact = true;
    r.integers = Row::kTimesNumber;
    r.refused = c.refused;
    rows.push_back(r);
  }
  return rows;
}

}  // namespace sherd::test
