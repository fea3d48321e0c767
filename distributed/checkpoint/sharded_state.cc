#include "distributed/checkpoint/sharded_state.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "distributed/agree.h"
#include "distributed/checkpoint/read_into.h"

namespace sherd::dist {
namespace {

constexpr std::string_view kModel = "model.", kOptimizer = "optimizer.", kState = "state.";

std::string model_name(const std::string& name) { return std::string(kModel) + name; }
std::string optimizer_name(const std::string& name) { return std::string(kOptimizer) + name; }

// "state.<parameter>.<kind>" in its parts; an empty parameter: another name.
struct StateName {
  std::string parameter, kind;
  bool is_scalar() const { return kind == "step" || kind == "group"; }
};
StateName parse(const std::string& name) {
  const size_t dot = name.rfind('.');
  if (!name.starts_with(kState) || dot <= kState.size()) return {};
  return {name.substr(kState.size(), dot - kState.size()), name.substr(dot + 1)};
}

ShardPiece whole(const std::string& name, const Tensor& values, bool shared) {
  return {name, values.sizes(), 0, values.numel(), contiguous_raw(values.detach()), shared};
}

using PartsByName = std::unordered_map<std::string, const ModelState::Part*>;
PartsByName parts_by_name(const ModelState& model) {
  PartsByName result;
  for (auto& p : model.parts()) result[p.name] = &p;
  return result;
}

// Elements [begin, end) of a stored tensor into `to`, converted.
void read_part(ShardReader& reader, const std::string& name, int64_t begin, int64_t end,
               const Tensor& to) {
  read_into(to, reader.index().tensor(name).dtype,
            [&](void* memory) { reader.read(name, begin, end, memory); });
}

bool is_narrower(DType to, DType from) {
  return is_float(from) ? !is_float(to) || size_of(to) < size_of(from)
                        : !is_float(to) && size_of(to) < size_of(from);
}

// All that is wrong, as one text.
class Problems {
 public:
  void run(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) {
      add(e.what());
    }
  }
  void add(const std::string& line) { text_ += (text_.empty() ? "" : "\n") + line; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

LocalState local_state(const ModelState& model, const optim::Optimizer* optimizer) {
  model.require_idle("saving");
  LocalState s;
  std::unordered_map<const void*, std::string> names;
  for (auto& p : model.parts()) {
    const auto [it, is_first] = names.try_emplace(p.parameter.impl(), model_name(p.name));
    if (!is_first) {
      s.aliases.emplace_back(model_name(p.name), it->second);
      continue;
    }
    if (p.begin == p.end && p.full_shape.numel() > 0) continue;
    s.pieces.push_back(
        {model_name(p.name), p.full_shape, p.begin, p.end, contiguous_raw(p.parameter.detach())});
  }
  // Rank 0's count.
  if (model.is_rank0())
    for (auto& [name, t] : model.buffers())
      s.pieces.push_back(whole(model_name(name), to_raw(t, model.stored_dtype(t)), false));
  if (!optimizer) return s;
  const PartsByName parts = parts_by_name(model);
  for (auto& [name, t] : optimizer->state_dict()) {
    const StateName n = parse(name);
    const auto part = parts.find(n.parameter);
    if (n.parameter.empty() || n.kind == "group") {
      s.pieces.push_back(whole(optimizer_name(name), t, true));
    } else if (part == parts.end() || n.is_scalar()) {
      s.pieces.push_back(whole(optimizer_name(name), t, false));
    } else {
      const ModelState::Part& p = *part->second;
      if (p.begin == p.end && p.full_shape.numel() > 0) continue;
      s.pieces.push_back(
          {optimizer_name(name), p.full_shape, p.begin, p.end, contiguous_raw(t.detach())});
    }
  }
  return s;
}

LocalState staged(LocalState state, LocalState& before) {
  for (size_t i = 0; i < state.pieces.size(); ++i) {
    ShardPiece& p = state.pieces[i];
    Tensor copy = i < before.pieces.size() ? before.pieces[i].values : Tensor();
    if (!copy.defined() || copy.dtype() != p.values.dtype() || copy.numel() != p.values.numel())
      copy = empty({p.values.numel()}, p.values.dtype());
    if (p.values.numel()) std::memcpy(copy.bytes(), p.values.bytes(), size_t(p.values.nbytes()));
    p.values = copy;
  }
  before = {};
  return state;
}

nn::LoadResult load_state(ShardReader& reader, const ModelState& model, optim::Optimizer* optimizer,
                          const LoadOptions& options) {
  const Group& group = model.group();
  const ShardIndex& index = reader.index();
  const auto wanted = [&](const std::string& name) { return !options.only || options.only(name); };

  // What to read, and all that is wrong with it.
  struct Target {
    std::string name;
    int64_t begin, end;
    Tensor to;
    DType dtype = to.dtype();  // that of the model, whatever it computes in
  };
  std::vector<Target> weights, moments;
  std::vector<std::string> scalars;  // of the optimizer
  std::vector<ShardIndex::Read> reads;
  nn::LoadResult result;
  all_or_none(group, [&] {
    model.require_idle("loading");
    Problems problems;
    std::vector<nn::ExpectedTensor> expected, found;
    for (auto& p : model.parts())
      if (wanted(p.name)) {
        expected.push_back({p.name, p.full_shape});
        weights.push_back({model_name(p.name), p.begin, p.end, p.parameter});
      }
    for (auto& [name, t] : model.buffers())
      if (wanted(name)) {
        expected.push_back({name, t.sizes()});
        weights.push_back({model_name(name), 0, t.numel(), t, model.stored_dtype(t)});
      }
    for (auto& [name, t] : index.tensors)
      if (name.starts_with(kModel) && wanted(name.substr(kModel.size())))
        found.push_back({name.substr(kModel.size()), t.shape});
    problems.run([&] {
      result = nn::check_state("load " + reader.path(), expected, found, options.strict);
    });
    std::erase_if(weights, [&](const Target& t) { return !index.tensors.contains(t.name); });
    for (const Target& t : weights)
      if (const DType from = index.tensor(t.name).dtype; is_float(t.dtype) && !is_float(from))
        problems.add(concat("[load ", reader.path(), "] ", t.name.substr(kModel.size()), " is ",
                            from, " in the file, ", t.dtype, " in the model"));
      else if (!options.allow_narrowing && is_narrower(t.dtype, from))
        problems.add(concat("[load ", reader.path(), "] ", t.name.substr(kModel.size()),
                            ": dtype mismatch: ", from, " in the file, ", t.dtype,
                            " in the model, which is narrower"));
    if (optimizer) {
      const PartsByName parts = parts_by_name(model);
      std::vector<nn::ExpectedTensor> expected_state, found_state;
      bool any = false;
      for (auto& [full_name, t] : index.tensors) {
        if (!full_name.starts_with(kOptimizer)) continue;
        any = true;
        const std::string name = full_name.substr(kOptimizer.size());
        const StateName n = parse(name);
        const auto part = parts.find(n.parameter);
        if (n.parameter.empty() || part == parts.end() || n.is_scalar()) {
          // A rank without elements of the parameter has no state of it, and never will.
          if (part != parts.end() && n.kind == "step" && part->second->begin == part->second->end &&
              part->second->full_shape.numel() > 0)
            continue;
          scalars.push_back(name);
          continue;
        }
        const ModelState::Part& p = *part->second;
        expected_state.push_back({name, p.full_shape});
        found_state.push_back({name, t.shape});
        if (!(t.shape == p.full_shape) || (p.begin == p.end && p.full_shape.numel() > 0)) continue;
        moments.push_back({name, p.begin, p.end, empty(p.parameter.sizes(), t.dtype)});
      }
      if (!any) problems.add(concat("[load ", reader.path(), "] it holds no optimizer's state"));
      problems.run(
          [&] { nn::check_state("load " + reader.path(), expected_state, found_state, true); });
      // Names alone; whoever is in another group is found when the values are there.
      if (any)
        problems.run([&] {
          std::vector<nn::ExpectedTensor> mine, theirs;
          for (auto& [name, p] : optimizer->named_parameters())
            mine.push_back({std::string(kState) + name + ".group", {}});
          for (auto& name : scalars)
            if (parse(name).kind == "group") theirs.push_back({name, {}});
          nn::check_state("load " + reader.path(), mine, theirs, true);
        });
    }
    if (!problems.text().empty()) throw Error(problems.text());
    const auto add = [&](const std::string& name, int64_t begin, int64_t end) {
      for (auto& r : index.reads(name, begin, end)) reads.push_back(r);
    };
    for (auto& t : weights) add(t.name, t.begin, t.end);
    for (auto& t : moments) add(optimizer_name(t.name), t.begin, t.end);
    for (auto& name : scalars)
      add(optimizer_name(name), 0, index.tensor(optimizer_name(name)).shape.numel());
  });

  all_or_none<DamagedCheckpoint>(group, [&] { reader.verify(reads); });
  nn::StateDict state;
  all_or_none<DamagedCheckpoint>(group, [&] {
    for (auto& name : scalars) {
      const auto& info = index.tensor(optimizer_name(name));
      const Tensor t = empty(info.shape, info.dtype);
      read_part(reader, optimizer_name(name), 0, info.shape.numel(), t);
      state.set(name, t);
    }
    for (auto& t : moments) {
      read_part(reader, optimizer_name(t.name), t.begin, t.end, t.to);
      state.set(t.name, t.to);
    }
  });
  if (optimizer) all_or_none(group, [&] { optimizer->load_state_dict(state); });
  all_or_none<DamagedCheckpoint>(group, [&] {
    for (auto& t : weights) read_part(reader, t.name, t.begin, t.end, t.to);
  });
  return result;
}

}  // namespace sherd::dist
