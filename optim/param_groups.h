// WithGroups: an optimizer's constructors and its typed parameter groups, from three structs:
//
//     Options    all options with their defaults                          AdamOptions
//     Group      .params, and an optional of each option                  AdamGroup
//     Fields     visit(f, structs..): f(name, the option of each struct)  AdamFields
//
//     optim::AdamW optimizer({{.params = weights}, {.params = biases, .weight_decay = 0}},
//                            {.lr = 1e-4, .weight_decay = 0.1});
//     for (auto& group : optimizer.param_groups()) group.lr *= 0.5;
//
// What a group leaves out is taken from the optimizer's options.
#pragma once
#include "optim/optimizer.h"

namespace sherd::optim {

template <class Options, class Group, class Fields>
class WithGroups : public Optimizer {
 public:
  // A group as it now is: options can be changed at any time, parameters cannot.
  class ParamGroup : public Options {
   public:
    ParamGroup(const Options& options, std::vector<Tensor> params)
        : Options(options), params_(std::move(params)) {}
    const std::vector<Tensor>& params() const { return params_; }

   private:
    std::vector<Tensor> params_;
  };

  std::span<ParamGroup> param_groups() { return groups_; }
  std::span<const ParamGroup> param_groups() const { return groups_; }

  // May be called between steps (unfrozen layers). Errors as at construction.
  void add_param_group(const Group& group) { add(group, {}); }

 protected:
  WithGroups(const std::vector<Tensor>& params, const Options& options) : defaults_(options) {
    refuse_empty(params.size());
    add({.params = params}, {});
  }
  WithGroups(const NamedTensors& params, const Options& options) : defaults_(options) {
    refuse_empty(params.size());
    Group group;
    std::vector<std::string> names;
    for (auto& [name, p] : params) names.push_back(name), group.params.push_back(p);
    add(group, names);
  }
  WithGroups(const std::vector<Group>& groups, const Options& options) : defaults_(options) {
    refuse_empty(groups.size());
    for (auto& g : groups) add(g, {});
  }

 private:
  static void refuse_empty(size_t n) {
    if (n == 0) fail("[optimizer] there are no parameters to optimize");
  }
  void add(const Group& group, const std::vector<std::string>& names) {
    Options o = defaults_;
    Fields::visit(
        [](const char*, auto& to, auto& given) {
          if (given) to = *given;
        },
        o, group);
    check_options_of(o);
    add_parameters(group.params, names);
    groups_.emplace_back(o, group.params);
  }
  void check_options(size_t group) const override { check_options_of(groups_[group]); }
  std::vector<Option> options(size_t group) override {
    std::vector<Option> result;
    Fields::visit(
        [&](const char* name, auto& value) {
          result.push_back({name, &value});
        },
        static_cast<Options&>(groups_[group]));
    return result;
  }

  Options defaults_;
  std::vector<ParamGroup> groups_;
};

}  // namespace sherd::optim
