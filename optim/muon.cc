#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "autograd/grad_mode.h"
#include "core/gemm.h"
#include "nn/shard_info.h"

namespace sherd::optim {
namespace {

Dims shape_of(const Tensor& param) {
  const auto* shard = nn::shard_info(param);
  return shard ? shard->full_shape() : param.sizes();
}

// To bfloat16 and back: kernels compute in float32, each of their results is rounded once.
Tensor rounded(const Tensor& x) { return to_raw(to_raw(x, kBFloat16), kFloat32); }
Tensor transposed(const Tensor& x) {
  return x.as_strided_raw({x.size(1), x.size(0)}, {x.stride(1), x.stride(0)}, 0);
}
Tensor product(const Tensor& a, const Tensor& b) {
  const Tensor y = empty({a.size(0), b.size(1)}, kFloat32, a.device());
  gemm(a, b, y);
  return y;
}

// The nearest matrix, roughly, whose singular values are 1. [A, B], bfloat16.
Tensor orthogonalise(const Tensor& matrix, const MuonOptions& o) {
  const auto [a, b, c] = o.ns_coefficients;
  const bool tall = matrix.size(0) > matrix.size(1);
  Tensor x = contiguous_raw(to_raw(tall ? transposed(matrix) : matrix, kFloat32));
  double squares = 0;
  for (const float v : std::span(x.data<float>(), size_t(x.numel()))) squares += double(v) * v;
  const double norm = rounded(full({}, float(std::sqrt(squares)), kFloat32)).item();
  x = rounded(x / std::max(norm, o.eps));
  for (int i = 0; i < o.ns_steps; ++i) {
    const Tensor gram = rounded(product(x, transposed(x)));
    const Tensor mix = rounded(b * gram + c * product(gram, gram));
    x = rounded(a * x + product(mix, x));
  }
  return contiguous_raw(to_raw(tall ? transposed(x) : x, kBFloat16));
}

// Shares matrices out, the costly ones first, each to the rank that has the least to do so far.
std::vector<int> owners(const std::vector<Dims>& shapes, int ranks) {
  std::vector<double> cost, load(size_t(ranks), 0.0);
  for (const Dims& s : shapes)
    cost.push_back(double(s[0]) * double(s[1]) * double(std::min(s[0], s[1])));
  std::vector<size_t> order(shapes.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return cost[a] > cost[b]; });
  std::vector<int> owner(shapes.size());
  for (size_t i : order) {
    owner[i] = int(std::ranges::min_element(load) - load.begin());
    load[size_t(owner[i])] += cost[i];
  }
  return owner;
}

}  // namespace

void check_options_of(const MuonOptions& o) {
  check_range("muon", "lr", o.lr, 0);
  check_range("muon", "weight_decay", o.weight_decay, 0);
  check_range("muon", "momentum", o.momentum, 0);
  check_range("muon", "eps", o.eps, 0);
  check_range("muon", "ns_steps", o.ns_steps, 0, 100);
}

std::span<const char* const> Muon::state_names() const {
  static constexpr const char* names[] = {"momentum_buffer"};
  return names;
}

void Muon::check_matrices() const {
  size_t position = 0;
  for (auto& group : param_groups())
    for (auto& p : group.params()) {
      if (const Dims shape = shape_of(p); shape.n != 2)
        fail("[muon] parameter ", named_parameters()[position].first, " has shape ", shape,
             ": Muon is for matrices; give embeddings, biases and norms to AdamW");
      ++position;
    }
}

// The momentum's new value goes into state; gives what is to be orthogonalised, or a part of it.
Tensor Muon::direction(size_t group, const Tensor& param, const Tensor& grad, State& state,
                       const GradientScaling& scaling) const {
  const MuonOptions& o = param_groups()[group];
  Tensor g = to_raw(grad, param.dtype());
  if (scaling.scale.defined()) g = g * scaling.scale.item();
  Tensor& buffer = state.tensors[0];
  if (!buffer.defined()) buffer = make_state(param);
  buffer.add_(g - buffer, 1 - o.momentum);
  return to_raw(o.nesterov ? buffer - (1 - o.momentum) * (buffer - g) : buffer, kBFloat16);
}

void Muon::apply(size_t group, const Dims& shape, const Tensor& param,
                 const Tensor& direction) const {
  const MuonOptions& o = param_groups()[group];
  const double rows = double(shape[0]), columns = double(shape[1]);
  const double ratio =
      o.adjust_lr_fn == AdjustLr::kMatchRmsAdamW       ? 0.2 * std::sqrt(std::max(rows, columns))
      : o.adjust_lr_fn == AdjustLr::kSpectralUnclamped ? std::sqrt(rows / columns)
                                                       : std::sqrt(std::max(1.0, rows / columns));
  param.detach().mul_(1 - o.lr * o.weight_decay);
  param.detach().add_(to_raw(direction, param.dtype()), -o.lr * ratio);
}

void Muon::update(size_t group, const Tensor& param, const Tensor& grad, State& state,
                  GradientScaling scaling) {
  if (param.numel() == 0) return;
  const MuonOptions& o = param_groups()[group];
  const Tensor u = direction(group, param, grad, state, scaling);
  apply(group, param.sizes(), param, orthogonalise(u, o));
}

// A sharded parameter, and its step: null where this rank has no gradient of it.
struct Muon::Sharded {
  const nn::ShardInfo* info;
  size_t group;
  Stepped* step;
};

void Muon::update_all(std::vector<Stepped>& stepped, const GradientScaling& scaling) {
  NoGrad off;
  check_matrices();  // of groups that were added, too
  std::unordered_map<const TensorImpl*, Stepped*> steps;
  for (auto& s : stepped) steps[s.param.impl()] = &s;
  std::vector<Stepped> whole;
  std::vector<std::vector<Sharded>> by_ranks;  // in the order of the groups, the same on all ranks
  for (size_t g = 0; g < num_groups(); ++g)
    for (auto& p : param_groups()[g].params()) {
      const auto found = steps.find(p.impl());
      Stepped* step = found == steps.end() ? nullptr : found->second;
      const nn::ShardInfo* info = nn::shard_info(p);
      if (!info) {
        if (step) whole.push_back(*step);
        continue;
      }
      const auto meet = [&](auto& s) { return s[0].info->group() == info->group(); };
      auto list = std::ranges::find_if(by_ranks, meet);
      if (list == by_ranks.end()) list = by_ranks.insert(by_ranks.end(), std::vector<Sharded>());
      list->push_back({info, g, step});
    }
  WithGroups::update_all(whole, scaling);
  for (auto& sharded : by_ranks) update_sharded(sharded, scaling);
}

void Muon::update_sharded(const std::vector<Sharded>& sharded, const GradientScaling& scaling) {
  const nn::ShardInfo& any = *sharded[0].info;
  const int ranks = any.ranks(), rank = any.rank();
  // A parameter is stepped if any rank has a gradient of it.
  const Tensor has_gradient = zeros({int64_t(sharded.size())}, kInt64);
  for (size_t i = 0; i < sharded.size(); ++i)
    has_gradient.data<int64_t>()[i] = sharded[i].step != nullptr;
  any.max(has_gradient);
  std::vector<Sharded> todo;
  std::vector<Dims> shapes;
  for (size_t i = 0; i < sharded.size(); ++i)
    if (has_gradient.data<int64_t>()[i])
      todo.push_back(sharded[i]), shapes.push_back(sharded[i].info->full_shape());
  const std::vector<int> owner = owners(shapes, ranks);
  const auto numel = [&](size_t i, int r) {  // of what rank r holds of todo[i]
    const auto [begin, end] = todo[i].info->part(r);
    return end - begin;
  };

  // What goes to each rank, and what comes from it: parts, one behind the other.
  std::vector<int64_t> out_numel(size_t(ranks), 0), in_numel(size_t(ranks), 0);
  for (size_t i = 0; i < todo.size(); ++i) {
    out_numel[size_t(owner[i])] += numel(i, rank);
    for (int r = 0; r < ranks && owner[i] == rank; ++r) in_numel[size_t(r)] += numel(i, r);
  }
  std::vector<Tensor> out, in;
  for (int64_t n : out_numel) out.push_back(empty({n}, kBFloat16));
  for (int64_t n : in_numel) in.push_back(empty({n}, kBFloat16));
  const auto cut = [](const Tensor& all, int64_t& at, int64_t n) {
    const Tensor t = all.as_strided_raw({n}, {1}, at);
    at += n;
    return t;
  };

  std::vector<int64_t> at(size_t(ranks), 0);
  std::vector<Tensor> mine;  // this rank's part of each: first the direction, then the update
  for (size_t i = 0; i < todo.size(); ++i) {
    mine.push_back(cut(out[size_t(owner[i])], at[size_t(owner[i])], numel(i, rank)));
    if (Stepped* step = todo[i].step)
      change(*step, [&](const Tensor& param, const Tensor& grad) {
        const Tensor u = direction(todo[i].group, param, grad, *step->state, scaling);
        copy_raw(mine[i], u.as_strided_raw({u.numel()}, {1}, 0));
      });
    else
      mine[i].detach().zero_();
  }
  any.all_to_all(in, out);

  std::fill(at.begin(), at.end(), 0);
  for (size_t i = 0; i < todo.size(); ++i) {
    if (owner[i] != rank) continue;
    const Tensor flat = empty({shapes[i].numel()}, kBFloat16);
    std::vector<Tensor> parts;
    int64_t place = 0;
    for (int r = 0; r < ranks; ++r) {
      parts.push_back(cut(in[size_t(r)], at[size_t(r)], numel(i, r)));
      copy_raw(cut(flat, place, parts.back().numel()), parts.back());
    }
    const Tensor whole = flat.as_strided_raw(shapes[i], {shapes[i][1], 1}, 0);
    const Tensor done = orthogonalise(whole, param_groups()[todo[i].group]);
    place = 0;
    for (const Tensor& p : parts) {
      copy_raw(p, done.as_strided_raw({p.numel()}, {1}, place));
      place += p.numel();
    }
  }
  any.all_to_all(out, in);

  for (size_t i = 0; i < todo.size(); ++i)
    if (todo[i].step)
      change(*todo[i].step, [&](const Tensor& param, const Tensor&) {
        apply(todo[i].group, shapes[i], param, mine[i]);
      });
}

}  // namespace sherd::optim
