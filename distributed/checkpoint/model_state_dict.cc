#include "distributed/checkpoint/model_state_dict.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/safetensors.h"
#include "distributed/agree.h"

namespace sherd::dist {

nn::StateDict get_model_state_dict(const ModelState& model) {
  ModelState m = model;
  nn::StateDict state;
  m.for_each_full([](const ModelState::Part& p) { return p.parameter.detach(); },
                  [&](const std::string& name, const Tensor& t) { state.set(name, t.clone()); });
  if (model.is_rank0())
    for (auto& [name, t] : model.buffers())
      state.set(name, to_raw(t, model.stored_dtype(t)).clone());
  return state;
}

nn::LoadResult set_model_state_dict(const ModelState& model, const nn::StateDict& state,
                                    bool strict) {
  using nlohmann::json;
  const Group& group = model.group();
  json found;
  std::map<std::string, Tensor> whole_of;  // on rank 0
  all_or_none(group, [&] {
    model.require_idle("loading");
    if (!model.is_rank0()) return;
    std::vector<nn::ExpectedTensor> expected, given;
    for (auto& p : model.parts()) expected.push_back({p.name, p.full_shape});
    for (auto& [name, t] : model.buffers()) expected.push_back({name, t.sizes()});
    for (auto& [name, t] : state) given.push_back({name, t.sizes()});
    const nn::LoadResult r = nn::check_state("set_model_state_dict", expected, given, strict);
    json dtypes;
    for (auto& [name, t] : state) {
      dtypes[name] = safetensors_name(t.dtype());
      whole_of[name] = contiguous_raw(t.detach());
    }
    found = {{"missing", r.missing}, {"unexpected", r.unexpected}, {"dtypes", dtypes}};
  });
  found = json::parse(all_gather_text(group, found.dump())[0]);
  const nn::LoadResult result{found.at("missing"), found.at("unexpected")};
  const std::set<std::string> missing(result.missing.begin(), result.missing.end());

  const auto load = [&](const std::string& name, const Dims& shape, int64_t begin, int64_t end,
                        const Tensor& to) {
    if (missing.contains(name)) return;
    const DType dtype = *safetensors_dtype(found.at("dtypes").at(name));
    const Tensor whole = model.is_rank0() ? whole_of.at(name) : empty(shape, dtype);
    if (size_of_group(group) > 1 && whole.numel())
      group->broadcast(whole, 0, {.label = "set_model_state_dict"}).wait();
    if (end > begin)
      copy_raw(to, whole.as_strided_raw(to.sizes(), contiguous_strides(to.sizes()),
                                        whole.storage_offset() + begin));
    to.bump_version();
  };
  for (auto& p : model.parts()) load(p.name, p.full_shape, p.begin, p.end, p.parameter);
  for (auto& [name, t] : model.buffers()) load(name, t.sizes(), 0, t.numel(), t);
  return result;
}

}  // namespace sherd::dist
