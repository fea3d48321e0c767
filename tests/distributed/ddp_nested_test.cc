// DistributedDataParallel round other wrappers.
#include <gtest/gtest.h>

#include <map>

#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

using Values = std::map<std::string, std::vector<float>>;

class Middle : public nn::Module {
 public:
  Middle()
      : own(add<nn::Linear>("own", 8, 8)),
        inner(add<nn::Linear>("inner", 8, 8)),
        after(add<nn::Linear>("after", 8, 8)) {}
  Tensor forward(const Tensor& x) { return after(relu(inner(relu(own(x))))); }
  nn::Child<nn::Linear> own, inner, after;
};
class Outer : public nn::Module {
 public:
  Outer()
      : first(add<nn::Linear>("first", 8, 8)),
        middle(add<Middle>("middle")),
        last(add<nn::Linear>("last", 8, 8)) {}
  Tensor forward(const Tensor& x) { return last(relu(middle(relu(first(x))))); }
  nn::Child<nn::Linear> first;
  nn::Child<Middle> middle;
  nn::Child<nn::Linear> last;
};

TEST(DdpNested, Z_006_DdpRoundFsdpRoundDdp) {
  for (auto strategy : kStrategies) {
    std::vector<std::vector<float>> losses[2];  // pure DDP, nested; by step, of both ranks
    std::vector<Values> parameters[2];          // by step
    for (const bool nested : {false, true})
      run_ranks(2, [&](int rank) {
        manual_seed(7);
        Outer m;
        std::optional<DistributedDataParallel<nn::Linear>> inner;
        std::optional<FullyShardedDataParallel<Middle>> fsdp;
        DdpOptions o;
        if (nested) {
          inner.emplace(*m.middle->inner);
          fsdp.emplace(*m.middle, FsdpOptions{.sharding_strategy = strategy,
                                              .seed = 7,
                                              .ignored_modules = {m.middle->inner.get()}});
          o.ignored_parameters = fsdp->parameters();
        }
        DistributedDataParallel ddp(m, o);
        EXPECT_EQ(ddp.reducer()->bucket_names()[0].size(), nested ? 4u : 10u);
        optim::Adam adam(m.parameters(), {.lr = 1e-2});
        for (int step = 0; step < 3; ++step) {
          adam.zero_grad();
          const Tensor loss = ddp(random_input({4, 8}, rank, step)).sum();
          loss.backward();
          adam.step();
          Tensor all = zeros({2});
          all.narrow(0, rank, 1).copy_(loss.detach().view({1}));
          dist::all_reduce(all);
          Values values;
          const auto add = [&](const std::string& name, const Tensor& t) {
            values[name] = floats(t);
          };
          if (nested)
            fsdp->for_each_full_parameter(
                [&](const std::string& name, const Tensor& t) { add("middle." + name, t); });
          if (rank > 0) continue;
          for (auto& [name, p] : m.named_parameters())
            if (!nested || !name.starts_with("middle.")) add(name, p);
          losses[nested].push_back(floats(all));
          parameters[nested].push_back(values);
        }
      });
    EXPECT_EQ(losses[0].size(), 3u);
    EXPECT_EQ(parameters[0][0].size(), 10u);
    EXPECT_EQ(losses[1], losses[0]) << name_of(strategy);
    EXPECT_EQ(parameters[1], parameters[0]) << name_of(strategy);
  }
}

TEST(DdpNested, WhatIsInAnotherWrapperIsRefusedByName) {
  run_ranks(2, [](int) {
    Outer m;
    FullyShardedDataParallel fsdp(*m.middle);
    expect_error([&] { DistributedDataParallel ddp(m); },
                 {"middle.own.weight", "another parallel wrapper", "ignored_parameters"});
  });
  for (auto strategy : kStrategies)
    run_ranks(2, [=](int) {
      Outer m;
      DistributedDataParallel ddp(*m.middle);
      expect_error([&] { FsdpModule(m, {.sharding_strategy = strategy}); },
                   {"middle.own.weight", "another parallel wrapper", "ignored_parameters"});
      FsdpModule(m, {.sharding_strategy = strategy, .ignored_modules = {m.middle.get()}});
    });
}

}  // namespace
}  // namespace sherd::scenario
