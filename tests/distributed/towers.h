// Towers: a small model of equal blocks, for several of FSDP's tests.
#pragma once
#include "tests/distributed/scenario.h"

namespace sherd::scenario {

// Linear(d, d) and three Mlp(d).
class Towers : public nn::Module {
 public:
  explicit Towers(int64_t dim)
      : in(add<nn::Linear>("in", dim, dim)), mlps(add<nn::ModuleList<Mlp>>("mlps")) {
    for (int i = 0; i < 3; ++i) mlps->append(dim);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (auto& m : *mlps) h = h + m(h);
    return h;
  }
  nn::Child<nn::Linear> in;
  nn::Child<nn::ModuleList<Mlp>> mlps;
};
inline Scenario towers(int64_t dim = 8, int64_t batch = 2) {
  return {.make = [=] {
    return instance(std::make_shared<Towers>(dim), [=](Towers& m, int rank, int step) {
      return nn::call(m, random_input({batch, dim}, rank, step)).sum();
    });
  }};
}
inline FsdpOptions mlp_units(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<Mlp>(), .sharding_strategy = s};
}
inline Towers& model_of(Trainee& t) { return static_cast<Towers&>(t.module()); }

}  // namespace sherd::scenario
