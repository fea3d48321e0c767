// Rows of the structured ops: products, normalisations, losses, attention.
#include <cmath>

#include "autograd/ops.h"
#include "tests/autograd/op_table.h"

namespace sherd::test {
namespace {

Row row(std::string name, Function f, Function reference, std::vector<Sample> samples, Sample large,
        double tolerance = 4) {
  Row r;
  r.name = std::move(name);
  r.f = std::move(f), r.reference = std::move(reference);
  r.samples = std::move(samples), r.large = std::move(large);
  r.tolerance = tolerance;
  return r;
}

// A constant vector beside x: its dtype and device.
Tensor constant_like(const Tensor& x, std::vector<double> v) {
  if (x.device().is_meta()) return empty({int64_t(v.size())}, x.dtype(), kMeta);
  return to_raw(tensor<double>(v), x.dtype());
}

// ---- products
Tensor matmul_reference(const Inputs& t) {
  Dims a = t[0].sizes(), b = t[1].sizes();
  const bool vector_a = a.n == 1, vector_b = b.n == 1;
  if (vector_a) a = Dims{1, a[0]};
  if (vector_b) b = Dims{b[0], 1};
  const Tensor x = t[0].as_strided_raw(a, contiguous_strides(a), 0),
               w = t[1].as_strided_raw(b, contiguous_strides(b), 0);
  const Dims sizes =
      joined(broadcast(head(a, a.n - 2), head(b, b.n - 2), "matmul"), {a[a.n - 2], b[b.n - 1]});
  const Tensor y = build(sizes, [&](const Dims& i) {
    double s = 0;
    for (int64_t k = 0; k < a[a.n - 1]; ++k)
      s += broadcast_at(x, with(i, i.n - 1, k)) * broadcast_at(w, with(i, i.n - 2, k));
    return s;
  });
  Dims kept = head(sizes, sizes.n - 2);
  if (!vector_a) kept.push(sizes[sizes.n - 2]);
  if (!vector_b) kept.push(sizes[sizes.n - 1]);
  return y.as_strided_raw(kept, contiguous_strides(kept), 0);
}

Tensor linear_reference(const Inputs& t) {
  const Tensor &x = t[0], &w = t[1];
  return build(with(x.sizes(), x.dim() - 1, w.size(0)), [&](const Dims& i) {
    const int64_t o = i[i.n - 1];
    double s = t.size() > 2 ? at(t[2], {o}) : 0;
    for (int64_t k = 0; k < w.size(1); ++k) s += at(x, with(i, i.n - 1, k)) * at(w, {o, k});
    return s;
  });
}

void add_products(std::vector<Row>& rows) {
  auto two = [](const char* what) { return std::string("matmul_") + what; };
  const Function f = [](const Inputs& t) { return matmul(t[0], t[1]); };
  const std::pair<std::string, std::vector<Sample>> forms[] = {
      {two("vectors"), {{{4}, {4}}, {{1}, {1}}, {{0}, {0}}, {{700}, {700}}}},
      {two("matrix_vector"), {{{2, 3}, {3}}, {{0, 3}, {3}}, {{2, 0}, {0}}, {{40, 70}, {70}}}},
      {two("vector_matrix"), {{{3}, {3, 2}}, {{3}, {3, 0}}, {{70}, {70, 40}}}},
      {two("matrices"),
       {{{2, 3}, {3, 4}},
        {{1, 1}, {1, 1}},
        {{2, 0}, {0, 3}},
        {{0, 3}, {3, 2}},
        {{2, 3}, {3, 0}},
        {{33, 65}, {65, 47}}}},
      {two("batch_matrix"),
       {{{2, 2, 3}, {3, 4}},
        {{2, 1, 2, 3}, {3, 2}},
        {{0, 2, 3}, {3, 4}},
        {{2, 0, 3}, {3, 4}},
        {{5, 7, 33}, {33, 20}}}},
      {two("matrix_batch"), {{{2, 3}, {2, 3, 4}}, {{2, 3}, {0, 3, 4}}, {{7, 33}, {5, 33, 20}}}},
      {two("batch_vector"), {{{2, 2, 3}, {3}}, {{3}, {2, 3, 2}}, {{3, 0, 2}, {2}}}},
      {two("batches"), {{{2, 2, 3}, {2, 3, 2}}, {{3, 2, 0}, {3, 0, 2}}, {{5, 7, 33}, {5, 33, 20}}}},
      {two("broadcast"),
       {{{2, 1, 2, 3}, {2, 3, 2}}, {{1, 2, 3}, {3, 3, 1}}, {{2, 3, 5, 7}, {3, 7, 4}}}}};
  for (auto& [name, samples] : forms) {
    Row r = row(name, f, matmul_reference, samples, samples.back(), 40);
    r.library = true, r.integers = Row::kStay;
    rows.push_back(r);
  }
  rows.back().refused = {[] {
                           matmul(full({2, 3}, 1), full({2, 3}, 1));
                         },
                         [] { matmul(full({}, 1), full({2}, 1)); },
                         [] { matmul(full({3}, 1), full({4}, 1)); },
                         [] {
                           matmul(full({2, 2, 3}, 1), full({3, 3, 2}, 1));
                         },
                         [] {
                           matmul(full({2, 3}, 1), full({3, 2}, 1, kFloat64));
                         }};

  rows.push_back(row(
      "linear", [](const Inputs& t) { return linear(t[0], t[1], t[2]); }, linear_reference,
      {{{2, 3}, {4, 3}, {4}},
       {{3}, {2, 3}, {2}},
       {{2, 2, 3}, {2, 3}, {2}},
       {{0, 3}, {2, 3}, {2}},
       {{2, 0}, {3, 0}, {3}},
       {{2, 3}, {0, 3}, {0}},
       {{5, 9, 33}, {47, 33}, {47}}},
      {{5, 9, 33}, {47, 33}, {47}}, 40));
  rows.back().library = true;
  rows.back().refused = {[] {
                           linear(full({2, 3}, 1), full({4, 2}, 1));
                         },
                         [] {
                           linear(full({2, 3}, 1), full({4, 3}, 1), full({3}, 1));
                         },
                         [] {
                           linear(full({}, 1), full({4, 3}, 1));
                         },
                         [] {
                           linear(full({2, 3}, 1), full({4, 3}, 1, kFloat64));
                         }};
  rows.push_back(row(
      "linear_no_bias", [](const Inputs& t) { return linear(t[0], t[1]); }, linear_reference,
      {{{2, 3}, {4, 3}}, {{5, 9, 33}, {47, 33}}}, {{5, 9, 33}, {47, 33}}, 40));
  rows.back().library = true, rows.back().integers = Row::kStay;
  rows.push_back(row(
      "linear_vector", [](const Inputs& t) { return linear(t[0], t[1]); }, matmul_reference,
      {{{2, 3}, {3}}, {{2, 2, 3}, {3}}, {{3}, {3}}}, {{40, 33}, {33}}, 40));
  rows.back().library = true, rows.back().integers = Row::kStay;
}

// ---- softmax
// f(values along `dim`, place) for each element.
Function along(int dim, std::function<double(const std::vector<double>&, int64_t)> f) {
  return [=](const Inputs& t) {
    const Tensor& x = t[0];
    if (x.dim() == 0) return build({}, [&](const Dims&) { return f({at(x, {})}, 0); });
    const int d = dim < 0 ? dim + x.dim() : dim;
    return build(x.sizes(), [&](const Dims& i) {
      std::vector<double> v;
      for (int64_t k = 0; k < x.size(d); ++k) v.push_back(at(x, with(i, d, k)));
      return f(v, i[d]);
    });
  };
}
double log_sum_exp(const std::vector<double>& v) {
  double m = -INFINITY, s = 0;
  for (double x : v) m = x != x || x > m ? x : m;
  for (double x : v) s += std::exp(x - m);
  return m + std::log(s);
}

void add_softmax(std::vector<Row>& rows) {
  const Function soft[] = {[](const Inputs& t) { return softmax(t[0], -1); },
                           [](const Inputs& t) { return softmax(t[0], 0); },
                           [](const Inputs& t) { return log_softmax(t[0], -1); },
                           [](const Inputs& t) { return log_softmax(t[0], 0); }};
  for (int form = 0; form < 4; ++form) {
    const int dim = form % 2 ? 0 : -1;
    const bool logarithm = form >= 2;
    rows.push_back(row(
        std::string(logarithm ? "log_softmax" : "softmax") + (dim ? "_last" : "_first"), soft[form],
        along(dim,
              [=](const std::vector<double>& v, int64_t k) {
                const double y = v[size_t(k)] - log_sum_exp(v);
                return logarithm ? y : std::exp(y);
              }),
        {{In({2, 3}, -4, 4)},
         {{2, 3, 4}},
         {{}},
         {{1}},
         {{5}},
         {{0, 3}},
         {{3, 0}},
         {{3, 700}},
         {{70, 90, 2}}},
        {{60, 701}}));
    rows.back().refused = {[=] { soft[form](Inputs{full({2, 3}, 1, kInt64)}); }};
  }
  rows.back().refused.push_back([] { log_softmax(full({2}, 1), 1); });
  rows.push_back(row("softmax_composed", [](const Inputs& t) { return softmax_composed(t[0], -1); },
                     along(-1, [](const std::vector<double>& v,
                                  int64_t k) { return std::exp(v[size_t(k)] - log_sum_exp(v)); }),
                     {{{2, 3}}, {{2, 3, 4}}}, {{60, 701}}));
}

// ---- layer_norm
Tensor layer_norm_reference(const Inputs& t, int n, double eps) {
  const Tensor& x = t[0];
  const Dims shape = tail(x.sizes(), n);
  const int lead = x.dim() - n;
  return build(x.sizes(), [&](const Dims& i) {
    double sum = 0, squares = 0;
    for_each_index(shape, [&](const Dims& j) { sum += at(x, joined(head(i, lead), j)); });
    const double mean = sum / double(shape.numel());
    for_each_index(shape, [&](const Dims& j) {
      squares += std::pow(at(x, joined(head(i, lead), j)) - mean, 2);
    });
    const Dims j = tail(i, n);
    double y = (at(x, i) - mean) / std::sqrt(squares / double(shape.numel()) + eps);
    if (t.size() > 1 && t[1].defined()) y *= at(t[1], j);
    return t.size() > 2 && t[2].defined() ? y + at(t[2], j) : y;
  });
}

void add_layer_norm(std::vector<Row>& rows) {
  rows.push_back(row(
      "layer_norm", [](const Inputs& t) { return layer_norm(t[0], t[1].sizes(), t[1], t[2]); },
      [](const Inputs& t) { return layer_norm_reference(t, t[1].dim(), 1e-5); },
      {{{2, 5}, {5}, {5}},
       {{5}, {5}, {5}},
       {{2, 2, 3}, {2, 3}, {2, 3}},
       {{0, 3}, {3}, {3}},
       {{7, 130}, {130}, {130}},
       {{3, 2, 300}, {2, 300}, {2, 300}}},
      {{90, 701}, {701}, {701}}, 20));
  rows.back().refused = {[] {
                           layer_norm(full({2, 3}, 1), {2});
                         },
                         [] {
                           layer_norm(full({2, 3}, 1), {});
                         },
                         [] {
                           layer_norm(full({3}, 1), {2, 3});
                         },
                         [] {
                           layer_norm(full({2, 3}, 1), {3}, full({2}, 1));
                         }};
  rows.push_back(row(
      "layer_norm_plain",
      [](const Inputs& t) { return layer_norm(t[0], {t[0].size(-1)}, {}, {}, 0.1); },
      [](const Inputs& t) { return layer_norm_reference(t, 1, 0.1); },
      {{{2, 5}}, {{2, 2, 3}}, {{7, 130}}}, {{90, 701}}, 20));
  rows.push_back(row(
      "layer_norm_weight", [](const Inputs& t) { return layer_norm(t[0], {t[0].size(-1)}, t[1]); },
      [](const Inputs& t) { return layer_norm_reference(t, 1, 1e-5); },
      {{{2, 5}, {5}}, {{7, 130}, {130}}}, {{90, 701}, {701}}, 20));
}

// ---- embedding
void add_embedding(std::vector<Row>& rows) {
  for (int form : {0, 1, 2}) {
    const std::optional<int64_t> padding =
        form == 0 ? std::nullopt : std::optional<int64_t>(form == 1 ? 2 : -1);
    rows.push_back(row(
        form == 0   ? "embedding"
        : form == 1 ? "embedding_padding"
                    : "embedding_last_is_padding",
        [padding](const Inputs& t) {
          const Tensor y = embedding(t[1], t[0], padding);
          if (!padding) return y;
          // Differences see the padding row; the derivative leaves it out on purpose: weigh it with
          // 0.
          const int64_t p = *padding < 0 ? *padding + t[0].size(0) : *padding;
          return where((t[1] == Tensor(p)).unsqueeze(-1), Tensor(0), y);
        },
        [padding](const Inputs& t) {
          const int64_t p = padding ? (*padding < 0 ? *padding + t[0].size(0) : *padding) : -1;
          return build(joined(t[1].sizes(), {t[0].size(1)}), [&](const Dims& i) {
            const int64_t id = int64_t(at(t[1], head(i, i.n - 1)));
            return id == p ? 0 : at(t[0], {id, i[i.n - 1]});
          });
        },
        {{{5, 3}, In::index({4}, 5)},
         {{5, 3}, In::index({2, 3}, 5)},
         {{5, 3}, In::index({}, 5)},
         {{5, 3}, In::index({0}, 5)},
         {{5, 0}, In::index({2}, 5)},
         {{30, 70}, In::index({50}, 30)}},
        {{100, 65}, In::index({40, 20}, 100)}, 10));
    rows.back().integers = padding ? Row::kTimesNumber : Row::kStay;
  }
  const Tensor table = full({3, 2}, 1);
  rows.back().refused = {[=] { embedding(tensor<int64_t>({3}), table); },
                         [=] { embedding(tensor<int64_t>({-1}), table); },
                         [=] { embedding(tensor<float>({1}), table); },
                         [=] { embedding(tensor<int64_t>({1}), full({3}, 1)); },
                         [=] { embedding(tensor<int64_t>({1}), table, 3); },
                         [=] { embedding(tensor<int64_t>({1}), table, -4); }};
}

// ---- losses
double reduced(const std::vector<double>& v, double count, Reduction r) {
  double s = 0;
  for (double x : v) s += x;
  return r == Reduction::kSum ? s : s / count;
}

const std::vector<double> kWeights{0.5, 2, 1, 0.25, 3};  // of five classes

Tensor cross_entropy_reference(const Inputs& t, const CrossEntropyArguments& a, bool weighted) {
  const Tensor &x = t[0], &target = t[1];
  const bool probabilities = target.dtype() == kFloat64;
  const int c = x.dim() == 1 ? 0 : 1;
  const int64_t v = x.size(c);
  Dims rows;
  for (int i = 0; i < x.dim(); ++i)
    if (i != c) rows.push(x.size(i));
  std::vector<double> losses;
  double count = 0;
  for_each_index(rows, [&](const Dims& i) {
    auto element = [&](const Tensor& from, int64_t k) {
      Dims index;
      for (int d = 0; d < x.dim(); ++d) index.push(d == c ? k : i[d < c ? d : d - 1]);
      return at(from, index);
    };
    std::vector<double> logits;
    for (int64_t k = 0; k < v; ++k) logits.push_back(element(x, k));
    const double lse = log_sum_exp(logits), s = a.label_smoothing;
    double loss = 0;
    const int64_t chosen = probabilities ? -1 : int64_t(at(target, i));
    if (!probabilities && chosen == a.ignore_index) {
      losses.push_back(0);
      return;
    }
    for (int64_t k = 0; k < v; ++k) {
      const double w = weighted ? kWeights[size_t(k)] : 1;
      const double p = probabilities ? element(target, k) : k == chosen;
      const double share = (1 - s) * p + s / double(v);
      if (share * w != 0) loss += share * w * (lse - logits[size_t(k)]);
    }
    losses.push_back(loss);
    count += probabilities || !weighted ? 1 : kWeights[size_t(chosen)];
  });
  if (a.reduction == Reduction::kNone)
    return tensor<double>(losses).as_strided_raw(rows, contiguous_strides(rows), 0);
  return build({}, [&](const Dims&) { return reduced(losses, count, a.reduction); });
}

void add_losses(std::vector<Row>& rows) {
  struct Form {
    std::string name;
    CrossEntropyArguments arguments;
    bool weighted = false, probabilities = false;
  };
  const Form forms[] = {{"mean", {}},
                        {"sum", {.reduction = Reduction::kSum}},
                        {"none", {.reduction = Reduction::kNone}},
                        {"ignore", {.ignore_index = 1}},
                        {"ignore_none", {.ignore_index = 1, .reduction = Reduction::kNone}},
                        {"smoothed", {.label_smoothing = 0.3}},
                        {"weighted", {}, true},
                        {"everything", {.ignore_index = 2, .label_smoothing = 0.2}, true},
                        {"everything_sum",
                         {.ignore_index = 2, .reduction = Reduction::kSum, .label_smoothing = 0.2},
                         true},
                        {"probabilities", {}, false, true},
                        {"probabilities_everything",
                         {.reduction = Reduction::kNone, .label_smoothing = 0.2},
                         true,
                         true}};
  for (const Form& form : forms) {
    std::vector<Sample> samples;
    // A mean over ignored rows alone is NaN, which differences cannot check.
    const bool may_be_nothing = form.arguments.ignore_index >= 0 || form.weighted;
    for (auto [x, t] :
         {std::pair<Dims, Dims>{{4, 5}, {4}},
          may_be_nothing ? std::pair<Dims, Dims>{{2, 5}, {2}} : std::pair<Dims, Dims>{{5}, {}},
          {{2, 5, 3}, {2, 3}},
          {{2, 5, 1, 2}, {2, 1, 2}},
          {{70, 5}, {70}}})
      samples.push_back({In(x, -3, 3), form.probabilities ? In(x, 0, 1) : In::index(t, 5)});
    Row r = row(
        "cross_entropy_" + form.name,
        [form](const Inputs& t) {
          CrossEntropyArguments a = form.arguments;
          if (form.weighted) a.weight = constant_like(t[0], kWeights);
          return cross_entropy(t[0], t[1], a);
        },
        [form](const Inputs& t) {
          return cross_entropy_reference(t, form.arguments, form.weighted);
        },
        samples,
        form.probabilities ? Sample{{900, 5}, {900, 5}} : Sample{{900, 5}, In::index({900}, 5)});
    rows.push_back(r);
  }
  const Tensor x = full({2, 3}, 1), t = tensor<int64_t>({0, 1});
  rows[rows.size() - 11].refused = {[=] {
                                      cross_entropy(x, tensor<int64_t>({0, 3}));
                                    },
                                    [=] {
                                      cross_entropy(x, tensor<int64_t>({0, -1}));
                                    },
                                    [=] { cross_entropy(x, tensor<int64_t>({0})); },
                                    [=] {
                                      cross_entropy(x, tensor<int32_t>({0, 1}));
                                    },
                                    [=] {
                                      cross_entropy(full({2, 3}, 1, kInt64), t);
                                    },
                                    [=] { cross_entropy(full({}, 1), t); },
                                    [=] { cross_entropy(x, t, {.weight = full({2}, 1)}); },
                                    [=] { cross_entropy(x, t, {.label_smoothing = 1.5}); },
                                    [=] { cross_entropy(x, t, {.label_smoothing = -0.1}); },
                                    [=] { cross_entropy(x, full({2}, 1)); },
                                    [=] {
                                      cross_entropy(x, full({2, 3}, 1), {.ignore_index = 1});
                                    }};

  // Many classes: more than a block of the kernel.
  rows.push_back(row(
      "cross_entropy_wide", [](const Inputs& t) { return cross_entropy(t[0], t[1]); },
      [](const Inputs& t) { return cross_entropy_reference(t, {}, false); },
      {{{2, 7}, In::index({2}, 7)}, {{3, 5003}, In::index({3}, 5003)}},
      {{200, 1001}, In::index({200}, 1001)}));
  rows.push_back(row(
      "cross_entropy_composed", [](const Inputs& t) { return cross_entropy_composed(t[0], t[1]); },
      [](const Inputs& t) { return cross_entropy_reference(t, {}, false); },
      {{{4, 5}, In::index({4}, 5)}}, {{200, 101}, In::index({200}, 101)}));

  for (Reduction r : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    rows.push_back(row(
        std::string("mse_loss_") + (r == Reduction::kNone   ? "none"
                                    : r == Reduction::kMean ? "mean"
                                                            : "sum"),
        [r](const Inputs& t) { return mse_loss(t[0], t[1], r); },
        [r](const Inputs& t) {
          const Tensor squares = build(
              t[0].sizes(), [&](const Dims& i) { return std::pow(at(t[0], i) - at(t[1], i), 2); });
          if (r == Reduction::kNone) return squares;
          std::vector<double> v(squares.data<double>(), squares.data<double>() + squares.numel());
          return build({}, [&](const Dims&) { return reduced(v, double(v.size()), r); });
        },
        {{{2, 3}, {2, 3}}, {{}, {}}, {{2, 3, 4}, {2, 3, 4}}, {{70, 90}, {70, 90}}},
        {{300, 301}, {300, 301}}));
    rows.back().integers = r == Reduction::kNone  ? Row::kStay
                           : r == Reduction::kSum ? Row::kWide
                                                  : Row::kRefused;
  }
}

// ---- attention
struct Attention {
  bool causal = false;
  std::optional<double> scale = {};
};
// Inputs q, k, v and, if there are four, a mask.
Tensor attention_reference(const Inputs& t, const Attention& a) {
  const Tensor &q = t[0], &k = t[1], &v = t[2];
  auto lead = [](const Tensor& x) { return head(x.sizes(), x.dim() - 2); };
  const Dims batch = broadcast(broadcast(lead(q), lead(k), "attention"), lead(v), "attention");
  const int64_t keys = k.size(-2), channels = q.size(-1);
  const double scale = a.scale.value_or(1 / std::sqrt(double(channels)));
  return build(joined(batch, {q.size(-2), v.size(-1)}), [&](const Dims& i) {
    const Dims b = head(i, i.n - 2);
    const int64_t row = i[i.n - 2];
    std::vector<double> scores;
    for (int64_t s = 0; s < keys; ++s) {
      double z = 0;
      for (int64_t c = 0; c < channels; ++c)
        z += broadcast_at(q, joined(b, {row, c})) * broadcast_at(k, joined(b, {s, c}));
      z *= scale;
      if (a.causal && s > row) z = -INFINITY;
      if (t.size() > 3) {
        const double m = broadcast_at(t[3], joined(b, {row, s}));
        z = t[3].dtype() == kBool ? (m != 0 ? z : -INFINITY) : z + m;
      }
      scores.push_back(z);
    }
    bool sees = false;
    for (double z : scores) sees = sees || z != -INFINITY;
    if (!sees) return 0.0;
    const double lse = log_sum_exp(scores);
    double y = 0;
    for (int64_t s = 0; s < keys; ++s) {
      const double p = std::exp(scores[size_t(s)] - lse);
      if (p != 0) y += p * broadcast_at(v, joined(b, {s, i[i.n - 1]}));
    }
    return y;
  });
}

// bool [T, S] that hides all keys from the second query, and others from the rest.
Tensor blinding_mask(int64_t t, int64_t s, Device device) {
  const Tensor m = empty({t, s}, kBool);
  for (int64_t i = 0; i < t * s; ++i) m.data<bool>()[i] = i / s != 1 && i % 3 != 0;
  return device.is_meta() ? empty({t, s}, kBool, device) : m;
}

void add_attention(std::vector<Row>& rows) {
  auto add = [&](std::string name, Function f, Function reference, std::vector<Sample> samples,
                 Sample large) {
    rows.push_back(row(std::move(name), std::move(f), std::move(reference), std::move(samples),
                       std::move(large), 20));
    rows.back().bad = {NAN};
  };
  const Sample small{{1, 2, 3, 2}, {1, 2, 4, 2}, {1, 2, 4, 3}};
  const Sample middle{{2, 2, 37, 16}, {2, 2, 41, 16}, {2, 2, 41, 16}};
  const Sample large{{2, 3, 150, 32}, {2, 3, 150, 32}, {2, 3, 150, 32}};
  for (bool causal : {false, true})
    add(
        causal ? "attention_causal" : "attention",
        [causal](const Inputs& t) {
          return scaled_dot_product_attention(t[0], t[1], t[2], {.is_causal = causal});
        },
        [causal](const Inputs& t) { return attention_reference(t, {causal}); },
        {small,
         {{3, 2}, {4, 2}, {4, 2}},                             // no batch, no heads
         {{2, 3, 2}, {2, 2, 2}, {2, 2, 1}},                    // no heads
         {{2, 1, 1, 2, 2}, {2, 1, 1, 3, 2}, {2, 1, 1, 3, 2}},  // five dimensions
         {{2, 1, 3, 2}, {1, 2, 4, 2}, {2, 2, 4, 2}},           // broadcast
         {{4, 2}, {2, 3, 2}, {2, 3, 2}},
         {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}},
         {{1, 0, 3, 2}, {1, 0, 4, 2}, {1, 0, 4, 2}},
         {{1, 2, 0, 2}, {1, 2, 3, 2}, {1, 2, 3, 2}},
         {{1, 2, 3, 2}, {1, 2, 0, 2}, {1, 2, 0, 2}},  // nothing to see
         middle},
        large);
  rows.back().refused = {
      [] {
        scaled_dot_product_attention(full({2, 3}, 1), full({2, 4}, 1), full({2, 4}, 1));
      },
      [] {
        scaled_dot_product_attention(full({2, 3}, 1), full({2, 3}, 1), full({3, 3}, 1));
      },
      [] {
        scaled_dot_product_attention(full({3}, 1), full({2, 3}, 1), full({2, 3}, 1));
      },
      [] {
        scaled_dot_product_attention(full({2, 3}, 1), full({2, 3}, 1, kFloat64), full({2, 3}, 1));
      },
      [] {
        const Tensor x = full({2, 3}, 1);
        scaled_dot_product_attention(x, x, x, {.mask = full({2, 2}, 1), .is_causal = true});
      },
      [] {
        const Tensor x = full({2, 3}, 1);
        scaled_dot_product_attention(x, x, x, {.mask = full({2, 3}, 1)});
      },
      [] {
        const Tensor x = full({2, 3}, 1);
        scaled_dot_product_attention(x, x, x, {.mask = full({2, 2}, 1, kInt64)});
      },
      [] {
        const Tensor x = full({2, 3}, 1);
        scaled_dot_product_attention(x, x, x, {.dropout_p = 1.5});
      },
      [] {
        scaled_dot_product_attention(full({2, 1, 3}, 1), full({3, 1, 3}, 1), full({3, 1, 3}, 1));
      }};
  add(
      "attention_scale",
      [](const Inputs& t) {
        return scaled_dot_product_attention(t[0], t[1], t[2], {.scale = 0.3});
      },
      [](const Inputs& t) {
        return attention_reference(t, {false, 0.3});
      },
      {small, middle}, large);
  auto with_mask = [](Sample s, In mask) {
    s.push_back(mask);
    return s;
  };
  const Function masked = [](const Inputs& t) {
    return scaled_dot_product_attention(t[0], t[1], t[2], {.mask = t[3]});
  };
  const Function masked_reference = [](const Inputs& t) { return attention_reference(t, {}); };
  add("attention_bool_mask", masked, masked_reference,
      {with_mask(small, In::truth({3, 4})), with_mask(small, In::truth({1, 2, 3, 4})),
       with_mask(small, In::truth({1, 1, 1, 4})),
       with_mask({{3, 2}, {4, 2}, {4, 2}}, In::truth({3, 4})),
       with_mask({{2, 3, 2}, {2, 4, 2}, {2, 4, 2}}, In::truth({2, 3, 4})),
       with_mask({{2, 3, 2}, {2, 4, 2}, {2, 4, 2}}, In::truth({3, 4})),
       with_mask({{1, 2, 1, 3, 2}, {1, 2, 1, 4, 2}, {1, 2, 1, 4, 2}}, In::truth({2, 1, 3, 4})),
       with_mask(middle, In::truth({37, 41}))},
      with_mask(large, In::truth({2, 1, 150, 150})));
  // A mask that wants a gradient itself.
  add("attention_float_mask", masked, masked_reference,
      {with_mask(small, {3, 4}), with_mask(small, {1, 2, 1, 4}), with_mask(middle, {2, 1, 37, 41})},
      with_mask(large, {150, 150}));
  rows.back().library = true;  // composed, where it is recorded
  // A constant one: the fused kernel.
  add(
      "attention_constant_mask",
      [](const Inputs& t) {
        return scaled_dot_product_attention(t[0], t[1], t[2], {.mask = t[3].detach()});
      },
      [](const Inputs& t) { return attention_reference(t, {}); },
      {with_mask(small, {3, 4}), with_mask(small, {1, 2, 1, 4}), with_mask(middle, {2, 1, 37, 41})},
      with_mask(large, {150, 150}));
  rows.back().differentiates_constants = true;
  add(
      "attention_blind_rows",
      [](const Inputs& t) {
        const Tensor mask = blinding_mask(t[0].size(-2), t[1].size(-2), t[0].device());
        return scaled_dot_product_attention(t[0], t[1], t[2], {.mask = mask});
      },
      [](const Inputs& t) {
        return attention_reference(
            {t[0], t[1], t[2], blinding_mask(t[0].size(-2), t[1].size(-2), kCPU)}, {});
      },
      {small, middle}, large);
  rows.back().bad = {};
  add(
      "attention_composed",
      [](const Inputs& t) { return scaled_dot_product_attention_composed(t[0], t[1], t[2]); },
      [](const Inputs& t) { return attention_reference(t, {}); }, {small}, middle);
  rows.back().library = true;

  for (int form : {0, 1, 2}) {
    auto mask = [form](int64_t t, Device d) {
      return form == 2 ? blinding_mask(t, t, d) : Tensor();
    };
    add(
        form == 0   ? "packed_attention"
        : form == 1 ? "packed_attention_causal"
                    : "packed_attention_masked",
        [=](const Inputs& t) {
          return packed_self_attention(t[0], 2, mask(t[0].size(1), t[0].device()), form == 1);
        },
        [=](const Inputs& t) {
          const int64_t b = t[0].size(0), n = t[0].size(1), d = t[0].size(2) / 6;
          Inputs in;
          for (int64_t part = 0; part < 3; ++part)
            in.push_back(build({b, 2, n, d}, [&](const Dims& i) {
              return at(t[0], {i[0], i[2], part * 2 * d + i[1] * d + i[3]});
            }));
          if (form == 2) in.push_back(mask(n, kCPU));
          const Tensor y = attention_reference(in, {form == 1});
          return build({b, n, 2 * d}, [&](const Dims& i) {
            return at(y, {i[0], i[2] / d, i[1], i[2] % d});
          });
        },
        {{{1, 3, 12}}, {{2, 2, 6}}, {{0, 2, 6}}, {{2, 35, 48}}}, {{2, 150, 96}});
    if (form == 2) rows.back().bad = {};
  }
  rows.back().refused = {[] {
                           packed_self_attention(full({2, 3, 10}, 1), 2);
                         },
                         [] {
                           packed_self_attention(full({2, 3, 12}, 1), 3);
                         },
                         [] {
                           packed_self_attention(full({2, 3, 12}, 1), 0);
                         },
                         [] {
                           packed_self_attention(full({3, 12}, 1), 2);
                         },
                         [] {
                           packed_self_attention(full({2, 3, 12}, 1, kInt64), 2);
                         },
                         [] {
                           packed_self_attention(full({2, 3, 12}, 1), 2, full({4, 4}, 1));
                         }};
}

}  // namespace

std::vector<Row> structured_rows() {
  std::vector<Row> rows;
  add_products(rows);
  add_softmax(rows);
  add_layer_norm(rows);
  add_embedding(rows);
  add_losses(rows);
  add_attention(rows);
  return rows;
}

}  // namespace sherd::test
