// The runtime of FSDP and DDP's reducer on small models, against each other and against one rank.
#include <gtest/gtest.h>

#include "autograd/checkpoint.h"
#include "core/generator.h"
#include "distributed/ddp.h"
#include "distributed/runtime.h"
#include "nn/nn.h"
#include "tests/distributed/spawn.h"

namespace sherd {
namespace {

using dist::run_ranks;
using dist::Runtime;

class Mlp : public nn::Module {
 public:
  explicit Mlp(int64_t dim)
      : up(add<nn::Linear>("up", dim, 4 * dim)), down(add<nn::Linear>("down", 4 * dim, dim)) {}
  Tensor forward(const Tensor& x) { return relu(down(relu(up(x)))); }
  nn::Child<nn::Linear> up, down;
};

class Stack : public nn::Module {
 public:
  Stack(int64_t layers, int64_t dim, bool checkpointed = false)
      : in(add<nn::Linear>("in", dim, dim)),
        layers(add<nn::ModuleList<Mlp>>("layers")),
        out(add<nn::Linear>("out", dim, 3)),
        checkpointed(checkpointed) {
    for (int64_t i = 0; i < layers; ++i) this->layers->append(dim);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (auto& l : *layers)
      h = h + (checkpointed ? checkpoint([&](const Tensor& t) { return l(t); }, h) : l(h));
    return out(h);
  }
  nn::Child<nn::Linear> in;
  nn::Child<nn::ModuleList<Mlp>> layers;
  nn::Child<nn::Linear> out;
  bool checkpointed;
};

std::vector<float> floats(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t, kFloat32));
  return {c.data<float>(), c.data<float>() + c.numel()};
}

Tensor input(int64_t rows, int64_t dim, int seed) {
  Generator& g = default_generator();
  const auto before = g.state();
  g.seed(uint64_t(seed));
  Tensor x = randn({rows, dim});
  g.set_state(before);
  return x;
}

void sgd(nn::Module& m, double lr) {
  NoGrad off;
  for (auto p : m.parameters()) {
    if (!p.grad().defined()) continue;
    p.add_(p.grad().to(p.dtype()), -lr);
    p.set_grad({});
  }
}

// Whole parameters after `steps`, gathered on every rank.
std::vector<float> train(const FsdpOptions* fsdp, int world, int rank, int steps,
                         int accumulate = 1, bool checkpointed = false,
                         std::vector<std::string>* trace = nullptr) {
  manual_seed(7);
  Stack model(3, 5, checkpointed);
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<DistributedDataParallel<Stack>> ddp;
  if (fsdp)
    runtime = Runtime::make(model, *fsdp);
  else if (world > 0)
    ddp = std::make_unique<DistributedDataParallel<Stack>>(
        model, DdpOptions{.bucket_cap_mb = 256.0 / (1 << 20), .first_bucket_bytes = 64});
  for (int step = 0; step < steps; ++step) {
    if (runtime) runtime->reset_stats();
    for (int micro = 0; micro < accumulate; ++micro) {
      const bool last = micro + 1 == accumulate;
      if (runtime) runtime->set_sync(last);
      std::optional<DistributedDataParallel<Stack>::NoSync> no_sync;
      if (ddp && !last) no_sync.emplace(ddp->reducer());
      Tensor loss = Tensor(0.0);
      const Tensor x = input(8, 5, 100 + step * accumulate + micro);
      if (world > 0) {
        std::vector<Tensor> rows;
        for (int64_t i = rank; i < 8; i += world) rows.push_back(x.select(0, i));
        loss = nn::call(model, stack(rows)).sum() * (1.0 / double(rows.size()));
      } else {
        loss = nn::call(model, x).sum() * (1.0 / 8);
      }
      loss.backward();
    }
    sgd(model, 0.05);
  }
  if (trace) *trace = runtime->stats().trace;
  std::vector<float> all;
  if (runtime) {
    for (auto& u : runtime->units())
      for (auto place : u->order()) {
        auto& e = u->entry(place);
        for (int root = 0; root < world; ++root) {
          Tensor t = u->collect(e, e.local, root);
          if (root == rank) {
            auto v = floats(t);
            all.insert(all.end(), v.begin(), v.end());
          }
        }
      }
  } else {
    // In the order of units: blocks, then what the root owns.
    auto add = [&](const Tensor& t) {
      auto v = floats(t);
      all.insert(all.end(), v.begin(), v.end());
    };
    for (auto& [name, p] : model.named_parameters())
      if (name.starts_with("layers.")) add(p);
    for (auto& [name, p] : model.named_parameters())
      if (!name.starts_with("layers.")) add(p);
  }
  return all;
}

FsdpOptions options(ShardingStrategy s) {
  FsdpOptions o;
  o.auto_wrap_policy = module_wrap_policy<Mlp>();
  o.sharding_strategy = s;
  o.record_trace = true;
  return o;
}

TEST(Sharding, StrategiesAndDdpGiveTheSameBits) {
  const std::vector<float> one = train(nullptr, 0, 0, 4);
  for (int world : {2, 3, 4}) {
    std::vector<float> ddp;
    for (int which = 0; which < 4; ++which) {
      std::vector<float> got;
      run_ranks(world, [&](int rank) {
        FsdpOptions o = options(ShardingStrategy(which % 3));
        const auto w = train(which == 3 ? nullptr : &o, world, rank, 4);
        if (rank == 0) got = w;
      });
      ASSERT_EQ(got.size(), one.size());
      for (size_t i = 0; i < one.size() && 8 % world == 0; ++i)
        ASSERT_NEAR(got[i], one[i], 1e-5) << i;
      if (which == 0)
        ddp = got;
      else
        EXPECT_EQ(got, ddp) << "world " << world << " strategy " << which;
    }
  }
}

TEST(Sharding, CheckpointingChangesNoBit) {
  std::vector<float> plain, checkpointed;
  run_ranks(2, [&](int rank) {
    FsdpOptions o = options(ShardingStrategy::kFullShard);
    auto w = train(&o, 2, rank, 3);
    if (rank == 0) plain = w;
  });
  run_ranks(2, [&](int rank) {
    FsdpOptions o = options(ShardingStrategy::kFullShard);
    auto w = train(&o, 2, rank, 3, 1, true);
    if (rank == 0) checkpointed = w;
  });
  EXPECT_EQ(plain, checkpointed);
}

TEST(Sharding, A_001_AccumulationEqualsOnAllStrategies) {
  std::vector<float> first;
  for (int which = 0; which < 4; ++which) {
    std::vector<float> got;
    run_ranks(2, [&](int rank) {
      FsdpOptions o = options(ShardingStrategy(which % 3));
      const auto w = train(which == 3 ? nullptr : &o, 2, rank, 3, 3);
      if (rank == 0) got = w;
    });
    if (which == 0)
      first = got;
    else
      EXPECT_EQ(got, first) << which;
  }
}

TEST(Sharding, P_001_OrderOfCollectives) {
  std::vector<std::string> trace;
  run_ranks(2, [&](int rank) {
    FsdpOptions o = options(ShardingStrategy::kFullShard);
    std::vector<std::string> t;
    train(&o, 2, rank, 3, 1, false, &t);
    if (rank == 0) trace = t;
  });
  const std::vector<std::string> expected{
      "gather 3", "show 3",    "gather 0",  "show 0",    "gather 1", "release 0", "show 1",
      "gather 2", "release 1", "show 2",    "release 2", "gather 2", "show 2",    "gather 1",
      "reduce 2", "post 2",    "release 2", "show 1",    "gather 0", "reduce 1",  "retire 2",
      "post 1",   "release 1", "show 0",    "reduce 0",  "retire 1", "post 0",    "release 0",
      "reduce 3", "retire 0",  "post 3",    "release 3", "retire 3"};
  EXPECT_EQ(trace, expected);
}

}  // namespace
}  // namespace sherd
