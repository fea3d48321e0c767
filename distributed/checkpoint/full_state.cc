#include "distributed/checkpoint/full_state.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "core/safetensors.h"
#include "distributed/agree.h"
#include "distributed/checkpoint/read_into.h"
#include "distributed/first_error.h"

namespace sherd::dist {
namespace {

// Elements [begin, end) of a stored tensor into `to`, converted.
void read_part(const SafetensorsReader& file, const std::string& name, int64_t begin, int64_t end,
               const Tensor& to) {
  read_into(to, file.info(name).dtype,
            [&](void* memory) { file.read_range(name, begin, end, memory); });
}

std::vector<nn::ExpectedTensor> stored_shapes(const SafetensorsReader& file) {
  std::vector<nn::ExpectedTensor> found;
  for (auto& t : file.tensors()) found.push_back({t.name, t.shape});
  return found;
}

}  // namespace

ModelState::ModelState(FsdpModule& fsdp)
    : fsdp_(&fsdp),
      group_(fsdp.runtime()->group()),
      parts_(fsdp.parts()),
      buffers_(fsdp.module().persistent_buffers()) {}

ModelState::ModelState(nn::Module& module, Group group) : group_(std::move(group)) {
  module.materialize();
  for (nn::Slot* s : module.slots())
    if (!s->is_buffer && s->tensor.defined())
      parts_.push_back({s->full_name(), s->tensor.sizes(), 0, s->tensor.numel(), s->tensor});
  buffers_ = module.persistent_buffers();
}

void ModelState::for_each_full(const Local& local, const Whole& f) {
  if (!fsdp_) {
    if (!is_rank0()) return;
    for (auto& p : parts_) f(p.name, local(p).detach());
    return;
  }
  std::unordered_map<std::string, const Part*> by_name;
  for (auto& p : parts_) by_name[p.name] = &p;
  fsdp_->for_each_full(
      [&](const std::string& name, const Tensor&) { return local(*by_name.at(name)); }, f);
}

DType ModelState::stored_dtype(const Tensor& buffer) const {
  return fsdp_ ? fsdp_->runtime()->original_dtype(buffer) : buffer.dtype();
}

// ---- weights
FileSummary save_weights(const std::string& path, ModelState& model) {
  const CollectiveCall call("save_weights");
  std::unique_ptr<SafetensorsWriter> writer;
  FileSummary summary;
  FirstError errors;  // after it the collectives go on to their end
  if (model.is_rank0())
    errors.run_if_none([&] {
      std::vector<SafetensorsWriter::Entry> entries;
      for (auto& p : model.parts()) entries.push_back({p.name, p.parameter.dtype(), p.full_shape});
      for (auto& [name, t] : model.buffers())
        entries.push_back({name, model.stored_dtype(t), t.sizes()});
      writer = std::make_unique<SafetensorsWriter>(path, std::move(entries),
                                                   SafetensorsMetadata{{"format", "pt"}});
    });
  model.for_each_full([](const ModelState::Part& p) { return p.parameter.detach(); },
                      [&](const std::string&, const Tensor& values) {
                        errors.run_if_none([&] { writer->append(contiguous_raw(values)); });
                      });
  if (model.is_rank0())
    errors.run_if_none([&] {
      for (auto& [name, t] : model.buffers())
        writer->append(contiguous_raw(to_raw(t, model.stored_dtype(t))));
    });
  if (model.is_rank0()) errors.run_if_none([&] { summary = writer->finish(); });
  writer.reset();
  throw_on_all(model.group(), errors.text());
  return summary;
}

void load_weights(const std::string& path, ModelState& model) {
  const CollectiveCall call("load_weights");
  std::unique_ptr<SafetensorsReader> file;
  all_or_none(model.group(), [&] {
    model.require_idle("loading");
    file = std::make_unique<SafetensorsReader>(path);
    std::vector<nn::ExpectedTensor> expected;
    for (auto& p : model.parts()) expected.push_back({p.name, p.full_shape});
    for (auto& [name, t] : model.buffers()) expected.push_back({name, t.sizes()});
    nn::check_state("load " + path, expected, stored_shapes(*file), true);
    const auto check_kind = [&](const std::string& name, DType dtype) {
      const DType from = file->info(name).dtype;
      if (is_float(dtype) != is_float(from))
        fail("[load ", path, "] ", name, " is ", from, " in the file, ", dtype, " in the model");
    };
    for (auto& p : model.parts()) check_kind(p.name, p.parameter.dtype());
    for (auto& [name, t] : model.buffers()) check_kind(name, t.dtype());
  });
  all_or_none(model.group(), [&] {
    for (auto& p : model.parts()) read_part(*file, p.name, p.begin, p.end, p.parameter);
    for (auto& [name, t] : model.buffers()) read_part(*file, name, 0, t.numel(), t);
  });
}

// ---- optimizer
FileSummary save_optimizer(const std::string& path, ModelState& model,
                           const optim::Optimizer& optimizer) {
  const CollectiveCall call("save_optimizer");
  const nn::StateDict state = optimizer.state_dict();
  const auto& parts = model.parts();
  // A rank that holds nothing of a parameter has never stepped it: what a parameter's state
  // consists of, and its number of steps, is agreed first.
  const int64_t n = int64_t(parts.size());
  Tensor steps = zeros({n}, kInt64), groups = zeros({n}, kInt64);
  std::set<std::string> kinds;
  for (int64_t i = 0; i < n; ++i) {
    const std::string prefix = "state." + parts[i].name + ".";
    if (const Tensor* s = state.find(prefix + "step"))
      steps.data<int64_t>()[i] = s->item<int64_t>();
    if (const Tensor* g = state.find(prefix + "group"))
      groups.data<int64_t>()[i] = g->item<int64_t>();
    for (auto& [name, t] : state)
      if (name.starts_with(prefix) && name != prefix + "step" && name != prefix + "group")
        kinds.insert(name.substr(prefix.size()));
  }
  if (size_of_group(model.group()) > 1)
    for (auto& t : {steps, groups})
      model.group()->all_reduce(t, ReduceOp::kMax, {.label = "save optimizer"}).wait();
  // Of one optimizer all parameters have the same kinds: some rank that stepped any names them.
  std::string text;
  for (auto& k : kinds) text += k + "\n";
  std::vector<std::string> names;
  for (const std::string& all : all_gather_text(model.group(), text)) {
    if (all.empty()) continue;
    for (size_t at = 0, end; at < all.size(); at = end + 1) {
      end = all.find('\n', at);
      names.push_back(all.substr(at, end - at));
    }
    break;
  }

  std::unique_ptr<SafetensorsWriter> writer;
  FileSummary summary;
  FirstError errors;  // after it the collectives go on to their end
  std::vector<std::pair<std::string, Tensor>> scalars;
  for (int64_t i = 0; i < n; ++i) {
    const std::string prefix = "state." + parts[i].name + ".";
    scalars.emplace_back(prefix + "group",
                         tensor<int64_t>(std::span(groups.data<int64_t>() + i, 1), {}));
    if (steps.data<int64_t>()[i] > 0)
      scalars.emplace_back(prefix + "step",
                           tensor<int64_t>(std::span(steps.data<int64_t>() + i, 1), {}));
  }
  for (auto& [name, t] : state)
    if (name.starts_with("param_groups.")) scalars.emplace_back(name, t);
  auto stepped = [&](int64_t i) { return steps.data<int64_t>()[i] > 0; };
  if (model.is_rank0())
    errors.run_if_none([&] {
      std::vector<SafetensorsWriter::Entry> entries;
      for (auto& [name, t] : scalars) entries.push_back({name, t.dtype(), t.sizes()});
      for (auto& kind : names)
        for (int64_t i = 0; i < n; ++i)
          if (stepped(i)) {
            const Tensor* mine = state.find("state." + parts[i].name + "." + kind);
            const DType d = mine                                     ? mine->dtype()
                            : parts[i].parameter.dtype() == kFloat64 ? kFloat64
                                                                     : kFloat32;
            entries.push_back({"state." + parts[i].name + "." + kind, d, parts[i].full_shape});
          }
      writer = std::make_unique<SafetensorsWriter>(path, std::move(entries));
      for (auto& [name, t] : scalars) writer->append(t);
    });
  std::unordered_map<std::string, int64_t> index;
  for (int64_t i = 0; i < n; ++i) index[parts[i].name] = i;
  for (auto& kind : names)
    model.for_each_full(
        [&](const ModelState::Part& p) {
          const Tensor* t = state.find("state." + p.name + "." + kind);
          if (t) return t->detach();
          const DType d = p.parameter.dtype() == kFloat64 ? kFloat64 : kFloat32;
          return zeros(p.parameter.sizes(), d);
        },
        [&](const std::string& name, const Tensor& values) {
          if (stepped(index.at(name))) errors.run_if_none([&] { writer->append(values); });
        });
  if (model.is_rank0()) errors.run_if_none([&] { summary = writer->finish(); });
  writer.reset();
  throw_on_all(model.group(), errors.text());
  return summary;
}

void load_optimizer(const std::string& path, ModelState& model, optim::Optimizer& optimizer) {
  const CollectiveCall call("load_optimizer");
  all_or_none(model.group(), [&] {
    SafetensorsReader file(path);
    std::unordered_map<std::string, const ModelState::Part*> by_name;
    std::vector<nn::ExpectedTensor> expected, found;
    for (auto& p : model.parts()) by_name[p.name] = &p;
    nn::StateDict state;
    for (auto& info : file.tensors()) {
      const std::string& name = info.name;
      if (!name.starts_with("state.")) {
        state.set(name, file.read(name));
        continue;
      }
      const size_t dot = name.rfind('.');
      const std::string parameter = name.substr(6, dot - 6), kind = name.substr(dot + 1);
      auto it = by_name.find(parameter);
      if (it == by_name.end() || kind == "step" || kind == "group") {
        // A rank without elements of the parameter has no state of it, and never will.
        if (it != by_name.end() && kind == "step" && it->second->begin == it->second->end) continue;
        state.set(name, file.read(name));
        continue;
      }
      const ModelState::Part& p = *it->second;
      expected.push_back({name, p.full_shape});
      found.push_back({name, info.shape});
      if (!(info.shape == p.full_shape) || p.begin == p.end) continue;
      Tensor part = empty(p.parameter.sizes(), info.dtype);
      file.read_range(name, p.begin, p.end, part.bytes());
      state.set(name, part);
    }
    nn::check_state("load " + path, expected, found, true);
    optimizer.load_state_dict(state);
  });
}

}  // namespace sherd::dist
