// Joins: ranks with unequal numbers of inputs. Rows J of tests/scenarios/rows.txt, by
// DistributedDataParallel and by FullyShardedDataParallel.
#include "distributed/join.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

using dist::Join;
using dist::JoinableStep;
using dist::JoinOptions;

constexpr double kMiB = 1 << 20;

std::vector<float> values_of(const nn::Module& m) {
  std::vector<float> all;
  for (auto& named : {m.named_parameters(), m.named_buffers()})
    for (auto& [name, t] : named)
      for (float v : floats(t)) all.push_back(v);
  return all;
}
// Fails unless all ranks have the same bits. A collective.
void expect_equal_on_all_ranks(const std::vector<float>& mine, const char* what) {
  Tensor t = tensor<float>(mine);
  dist::broadcast(t, 0);
  EXPECT_EQ(floats(t), mine) << what << ", rank " << dist::rank();
}

// One all-reduce of 1 an input; ranks that ran out give 0.
class AllReducer : public dist::Joinable {
 public:
  explicit AllReducer(dist::Group group = dist::default_group()) : group_(std::move(group)) {}

  double operator()() {
    Join::notify_join_context(*this);
    return sum(1);
  }
  std::unique_ptr<dist::JoinHook> join_hook(Join&) override {
    class Hook : public dist::JoinHook {
     public:
      explicit Hook(AllReducer& a) : a(a) {}
      void main_hook() override { a.sum(0); }
      void post_hook(bool is_last_joiner) override {
        ++a.ended;
        a.was_last = is_last_joiner;
        // The value of the last one, on all: the highest rank of those that came last.
        Tensor who = full({1}, is_last_joiner ? dist::rank() : -1, kInt32);
        dist::all_reduce(who, dist::ReduceOp::kMax);
        a.value = full({1}, dist::rank() == int(who.item()) ? 42 : 0);
        dist::broadcast(a.value, int(who.item()));
      }
      AllReducer& a;
    };
    return std::make_unique<Hook>(*this);
  }
  dist::Group join_process_group() override { return group_; }

  int ended = 0;
  bool was_last = false;
  Tensor value;

 private:
  double sum(double x) {
    Tensor t = full({1}, x);
    group_->all_reduce(t).wait();
    return t.item();
  }
  dist::Group group_;
};

TEST(Join, J_001_TotalsOfUnevenInputs) {
  run_ranks(4, [](int rank) {
    AllReducer a;
    double total = 0;
    {
      Join join({a});
      for (int i = 0; i < 3 + rank; ++i) total += a();
    }
    EXPECT_EQ(total, (std::vector<double>{12, 15, 17, 18})[size_t(rank)]) << rank;
    EXPECT_EQ(a(), 4);  // as before
  });
}

TEST(Join, J_002_ThreeJoinables) {
  run_ranks(4, [](int rank) {
    AllReducer a, b, c;
    double total = 0;
    {
      Join join({a, b, c});
      for (int i = 0; i < 3 + rank; ++i) total += a() + b() + c();
    }
    EXPECT_EQ(total, 3 * (std::vector<double>{12, 15, 17, 18})[size_t(rank)]) << rank;
    for (auto* x : {&a, &b, &c}) {
      EXPECT_EQ(x->ended, 1);
      EXPECT_EQ(x->was_last, rank == 3);
      EXPECT_EQ(x->value.item(), 42);
    }
  });
  // Ranks that end together are last together; also those that have no inputs at all.
  for (const int inputs : {0, 2})
    run_ranks(3, [&](int) {
      AllReducer a;
      {
        Join join({a});
        for (int i = 0; i < inputs; ++i) EXPECT_EQ(a(), 3);
      }
      EXPECT_EQ(a.ended, 1);
      EXPECT_TRUE(a.was_last);
    });
}

TEST(Join, J_002_NobodyHasInputs) {
  run_ranks(2, [](int rank) {
    nn::Linear m(3, 2);
    DistributedDataParallel ddp(m);
    { const Join join = ddp.join(); }
    ddp(random_input({4, 3}, rank, 0)).sum().backward();  // and it goes on
    EXPECT_TRUE(m.weight->grad().defined());
  });
}

// What a rank dropped before its inputs ran out is not sent by those steps that it shadows.
TEST(Join, J_001_DroppedGradientsStayDropped) {
  run_ranks(2, [](int rank) {
    manual_seed(3);
    nn::Linear m(3, 2, {.bias = false});
    DistributedDataParallel ddp(m);
    {
      const Join join = ddp.join();
      {
        const auto wait = ddp.no_sync();
        ddp(full({1, 3}, 100)).sum().backward();
      }
      m.weight->set_grad({});
      if (rank == 0) ddp(full({1, 3}, 4)).sum().backward();
    }
    if (rank == 0) {
      EXPECT_EQ(floats(m.weight->grad()), std::vector<float>(6, 2));  // 4, over two ranks
    } else {
      EXPECT_FALSE(m.weight->grad().defined());
    }
  });
}

TEST(Join, J_003_SwitchedOff) {
  run_ranks(3, [](int) {
    AllReducer a, b;
    const auto before = dist::default_group()->sequence_number();
    double total_a = 0, total_b = 0;
    {
      Join join({a, b}, {.enable = false});
      for (int i = 0; i < 3; ++i) total_a += a(), total_b += b();
    }
    EXPECT_EQ(total_a, 9);
    EXPECT_EQ(total_b, 9);
    EXPECT_EQ(dist::default_group()->sequence_number(), before + 6);
    EXPECT_EQ(a.ended + b.ended, 0);
  });
}

TEST(Join, J_004_ThrowOnEarlyTermination) {
  run_ranks(3, [](int rank) {
    AllReducer a;
    int iterations = 0;
    const auto loop = [&] {
      Join join({a}, {.throw_on_early_termination = true});
      for (int i = 0; i < 3 + rank; ++i, ++iterations) a();
    };
    if (rank == 0)
      expect_error(loop, {"rank 0 exhausted its inputs"});
    else
      expect_error(loop, {"a rank exhausted its inputs (rank 0)"});
    EXPECT_EQ(iterations, 3);
    EXPECT_EQ(a.ended, 0);
    EXPECT_EQ(a(), 3);  // it has left the Join
    // Of inputs that are even, nothing comes of it.
    {
      Join join({a}, {.throw_on_early_termination = true});
      for (int i = 0; i < 2; ++i) EXPECT_EQ(a(), 3);
    }
    EXPECT_EQ(a.ended, 1);
  });
}

TEST(Join, Refusals) {
  run_ranks(2, [](int) {
    expect_error([] { Join join({}); }, {"nothing to join"});
    AllReducer a, other(dist::new_group({0, 1}));
    expect_error([&] { Join join({a, other}); }, {"process group", "one group"});
    expect_error([&] { Join join({a, a}); }, {"joinable 1 is in a Join already"});
    JoinableStep step([] {});
    expect_error([&] { Join join({step, a}); }, {"JoinableStep is the first"});
    {
      Join join({a});
      expect_error([&] { Join inner({a}); }, {"in a Join already"});
    }
    Join again({a});
  });
}

TEST(Join, J_005_DdpEqualsOneProcessThatDidAllSteps) {
  for (const int world : {2, 4})
    run_ranks(world, [&](int rank) {
      const double lr = 0.03;
      manual_seed(7);
      nn::Linear m(10, 10, {.bias = false}), local(10, 10, {.bias = false});
      local.materialize();
      const Tensor x = random_input({3, 10}, 0, 0);
      optim::SGD all(local.parameters(), {.lr = lr});
      for (int i = 0; i < world * (world + 1); ++i) {
        all.zero_grad();
        nn::call(local, x).sum().backward();
        all.step();
      }
      DistributedDataParallel ddp(m);
      optim::SGD sgd(ddp.parameters(), {.lr = lr * world});
      {
        const auto join = ddp.join();
        for (int i = 0; i < 2 * (rank + 1); ++i) {
          sgd.zero_grad();
          ddp(x).sum().backward();
          sgd.step();
        }
      }
      const auto got = values_of(m), expected = values_of(local);
      // The gradient does not depend on the weights: sums of up to 20 equal terms in another order.
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4) << i;
      expect_equal_on_all_ranks(got, "weights");
    });
}

// Keeps count in a buffer.
class Model : public nn::Module {
 public:
  Model(int64_t in, int64_t hidden)
      : up(add<nn::Linear>("up", in, hidden)),
        down(add<nn::Linear>("down", hidden, in)),
        count(buffer("count", zeros({1}))),
        mean(buffer("mean", zeros({in}))) {}
  Tensor forward(const Tensor& x) {
    NoGrad off;
    Tensor c = count, m = mean;
    c.add_(Tensor(1.0));
    m.copy_(x.detach().mean({0}));
    GradMode on(true);
    return down(relu(up(x)));
  }
  nn::Child<nn::Linear> up, down;
  nn::Buffer count, mean;
};

TEST(Join, J_006_DdpModelsBuffersAndHooks) {
  struct Case {
    int64_t in, hidden;
    bool hook, throws;
  };
  // The large model has two buckets of over a MiB.
  for (const Case& c :
       {Case{10, 20, false, false}, Case{10, 20, true, false}, Case{600, 512, false, false},
        Case{600, 512, true, false}, Case{10, 20, false, true}})
    run_ranks(3, [&](int rank) {
      manual_seed(uint64_t(rank));
      Model m(c.in, c.hidden);
      DistributedDataParallel ddp(m, {.bucket_cap_mb = 1});
      if (c.hook) ddp.register_comm_hook(nullptr, dist::bf16_compress_hook);
      optim::SGD sgd(ddp.parameters(), {.lr = 1e-3});
      const int inputs = 2 + (rank + 1) % 3;  // 3, 4, 2
      int iterations = 0;
      const auto loop = [&] {
        const auto join = ddp.join({.throw_on_early_termination = c.throws});
        for (int i = 0; i < inputs; ++i, ++iterations) {
          sgd.zero_grad();
          ddp(random_input({2, c.in}, rank, i)).mean().backward();
          sgd.step();
        }
      };
      if (c.throws) {
        expect_error(loop, {rank == 2 ? "rank 2 exhausted its inputs" : "a rank exhausted"});
        EXPECT_EQ(iterations, 2);
        return;
      }
      loop();
      EXPECT_GE(iterations, 2);
      EXPECT_EQ(iterations, inputs);
      // Rank 1 was the last.
      EXPECT_EQ(m.count->item(), 4);
      expect_equal_on_all_ranks(values_of(m), "model and buffers");
      // And on, evenly, out of the Join.
      sgd.zero_grad();
      ddp(random_input({2, c.in}, rank, 9)).mean().backward();
      sgd.step();
      expect_equal_on_all_ranks(floats(m.up->weight), "weights after the Join");
    });
}

// Weights move by lr times the sum of what the iterations' gradients are divided to.
TEST(Join, WhatGradientsAreDividedBy) {
  for (const bool by_initial : {true, false})
    run_ranks(3, [&](int rank) {
      nn::Linear m(2, 1, {.bias = false});
      m.materialize();
      DistributedDataParallel ddp(m);
      const auto before = values_of(m);
      optim::SGD sgd(ddp.parameters(), {.lr = 1});
      const Tensor x = ones({1, 2});  // the gradient of each input is (1, 1)
      {
        const auto join = ddp.join({.divide_by_initial_world_size = by_initial});
        for (int i = 0; i <= rank; ++i) {
          sgd.zero_grad();
          ddp(x).sum().backward();
          sgd.step();
        }
      }
      // Three, two and one ranks had inputs.
      const double moved = by_initial ? 3.0 / 3 + 2.0 / 3 + 1.0 / 3 : 3;
      for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(values_of(m)[i], before[i] - moved, 1e-5);
      sgd.zero_grad();
      ddp(x).sum().backward();
      EXPECT_EQ(m.weight->grad().data<float>()[0], 1);
    });
}

TEST(Join, EvenInputsGiveTheBitsOfNoJoin) {
  run_ranks(3, [](int rank) {
    std::vector<float> without;
    for (const bool joined : {false, true}) {
      manual_seed(7);
      Mlp m(5);
      DistributedDataParallel ddp(m, {.bucket_cap_mb = 256 / kMiB, .first_bucket_bytes = 64});
      optim::Adam adam(ddp.parameters(), {.lr = 1e-2});
      {
        const auto join = ddp.join({.enable = joined});
        for (int i = 0; i < 4; ++i) {
          adam.zero_grad();
          ddp(random_input({3, 5}, rank, i)).sum().backward();
          adam.step();
        }
      }
      if (!joined)
        without = values_of(m);
      else
        EXPECT_EQ(values_of(m), without);
    }
  });
}

// Rank 0 has no inputs at all: buckets are made in an order that it gives, and it has none.
TEST(Join, ARankWithoutInputs) {
  run_ranks(2, [](int rank) {
    manual_seed(7);
    Mlp m(5), local(5);
    local.materialize();
    DistributedDataParallel ddp(m, {.bucket_cap_mb = 256 / kMiB, .first_bucket_bytes = 64});
    optim::SGD sgd(ddp.parameters(), {.lr = 0.1}), alone(local.parameters(), {.lr = 0.1});
    {
      const auto join = ddp.join();
      for (int i = 0; i < 3 * rank; ++i) {
        sgd.zero_grad();
        ddp(random_input({3, 5}, 1, i)).sum().backward();
        sgd.step();
      }
    }
    for (int i = 0; i < 3; ++i) {
      alone.zero_grad();
      (nn::call(local, random_input({3, 5}, 1, i)).sum() * 0.5).backward();
      alone.step();
    }
    const auto got = values_of(m), expected = values_of(local);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5) << i;
    expect_equal_on_all_ranks(got, "weights");
    for (const Tensor& p : m.parameters()) EXPECT_EQ(p.grad().defined(), rank == 1);
  });
}

// Gradients that a rank added up before it ran out are exchanged with the others' next.
TEST(Join, Accumulation) {
  run_ranks(2, [](int rank) {
    nn::Linear m(2, 1, {.bias = false});
    m.materialize();
    DistributedDataParallel ddp(m);
    const auto before = values_of(m);
    optim::SGD sgd(ddp.parameters(), {.lr = 1});
    {
      const auto join = ddp.join();
      for (int i = 0; i < 3 + 3 * rank; ++i) {  // a pair a step; rank 0 ends in mid pair
        std::optional<DistributedDataParallel<nn::Linear>::NoSync> waits;
        if (i % 2 == 0) waits.emplace(ddp.reducer());
        if (i % 2 == 0) sgd.zero_grad();
        ddp(ones({1, 2})).sum().backward();
        if (i % 2 == 1) sgd.step();
      }
    }
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(values_of(m)[i], before[i] - (3 + 6) / 2.0, 1e-5);
    expect_equal_on_all_ranks(values_of(m), "weights");
  });
  // Forward in no_sync and backward out of it, or one rank in it and another not: refused.
  run_ranks(2, [](int rank) {
    nn::Linear m(2, 1);
    DistributedDataParallel ddp(m);
    expect_error(
        [&] {
          const auto join = ddp.join();
          Tensor y;
          {
            const auto waits = ddp.no_sync();
            y = ddp(ones({1, 2}));
          }
          y.sum().backward();
        },
        {"no_sync", "forward and backward alike"});
    expect_error(
        [&] {
          const auto join = ddp.join();
          std::optional<DistributedDataParallel<nn::Linear>::NoSync> waits;
          if (rank == 0) waits.emplace(ddp.reducer());
          ddp(ones({1, 2}));
        },
        {"ranks 0 and 1 begin different iterations"});
  });
}

// With a step that ranks which ran out take too, the optimizer's state stays equal: training can go
// on after the Join.
TEST(Join, DdpWithAStep) {
  run_ranks(3, [](int rank) {
    manual_seed(7);
    Mlp m(5);
    DistributedDataParallel ddp(m);
    optim::Adam adam(ddp.parameters(), {.lr = 1e-2});
    int steps = 0;
    JoinableStep step([&] {
      optim::clip_grad_norm_(ddp.parameters(), 0.5);
      adam.step();
      adam.zero_grad();
      ++steps;
    });
    for (int epoch = 0; epoch < 2; ++epoch) {
      Join join({ddp, step});
      for (int i = 0; i < 2 + 2 * rank; ++i) {
        ddp(random_input({3, 5}, rank, 10 * epoch + i)).sum().backward();
        step();
      }
    }
    EXPECT_EQ(steps, 12);
    ddp(random_input({3, 5}, rank, 99)).sum().backward();
    step();
    expect_equal_on_all_ranks(values_of(m), "weights");
  });
}

// ---- FSDP
// The weights, on rank 0, after two epochs of uneven inputs.
Trainee::Values train_unevenly(const Way& way, int world, bool by_initial = true) {
  Trainee::Values result;
  run_ranks(world, [&](int rank) {
    const Scenario s{.make = [] {
      return instance(std::make_shared<Gpt>(GptOptions{.layers = 2}),
                      [](Gpt& m, int rank, int step) {
                        return nn::call(m, random_ids({2, 6}, 8, rank, step)).sum();
                      });
    }};
    Trainee t(s, way, rank, world);
    JoinableStep step([&] {
      if (t.fsdp)
        t.fsdp->clip_grad_norm_(1.0);
      else
        optim::clip_grad_norm_(t.stepped(), 1.0);
      for (auto& o : t.optimizers) o->step(), o->zero_grad();
    });
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::optional<dist::JoinableRef> model;
      if (t.fsdp)
        model.emplace(*t.fsdp);
      else
        model.emplace(*t.ddp);
      Join join({*model, step}, {.divide_by_initial_world_size = by_initial});
      for (int i = 0; i < 1 + (rank + epoch) % world; ++i) {
        if (t.ddp) t.ddp->begin_forward();  // by the wrapper, which Trainee has none of
        t.backward(10 * epoch + i);
        step();
      }
    }
    const auto values = t.parameters();
    if (rank == 0) result = values;
  });
  return result;
}

TEST(Join, FsdpGivesTheBitsOfDdp) {
  for (const bool by_initial : {true, false}) {
    const auto ddp = train_unevenly(ddp_way(), 4, by_initial);
    ASSERT_GT(ddp.size(), 10u);
    FsdpOptions o;
    o.auto_wrap_policy = module_wrap_policy<GptBlock>();
    for (auto strategy : kStrategies) {
      if (!by_initial && strategy != ShardingStrategy::kFullShard) continue;
      o.sharding_strategy = strategy;
      EXPECT_EQ(train_unevenly(fsdp_way(o), 4, by_initial), ddp) << name_of(strategy);
    }
    if (by_initial) {
      EXPECT_EQ(train_unevenly(hybrid_way(o, 2), 4), ddp);
    }
  }
}

TEST(Join, FsdpRefusals) {
  run_ranks(2, [](int rank) {
    Mlp m(4);
    FullyShardedDataParallel fsdp(m);
    JoinableStep step([] {});
    expect_error([&] { Join join({fsdp}); }, {"FullyShardedDataParallel", "JoinableStep"});
    expect_error(
        [&] {
          Join join({fsdp, step});
          NoGrad off;
          fsdp(random_input({2, 4}, rank, 0));
        },
        {"no_grad", "Evaluate when the Join is over"});
    NoGrad off;
    fsdp(random_input({2, 4}, rank, 0));  // out of it, it works
  });
  // A rank that never had an input cannot know what to do; nothing hangs.
  try {
    run_ranks(2, [](int rank) {
      Mlp m(4);
      FullyShardedDataParallel fsdp(m);
      JoinableStep step([] {});
      Join join({fsdp, step});
      for (int i = 0; i < 2 * rank; ++i) {
        fsdp(random_input({2, 4}, rank, i)).sum().backward();
        step();
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("rank 0 has run no iteration"), std::string::npos)
        << e.what();
  }
}

TEST(Join, FsdpAccumulation) {
  std::vector<float> ddp_result;
  for (const bool sharded : {false, true}) {
    run_ranks(2, [&](int rank) {
      manual_seed(7);
      Mlp m(5);
      std::optional<DistributedDataParallel<Mlp>> ddp;
      std::optional<FullyShardedDataParallel<Mlp>> fsdp;
      if (sharded)
        fsdp.emplace(m);
      else
        ddp.emplace(m);
      optim::Adam adam(m.parameters(), {.lr = 1e-2});
      JoinableStep step([&] { adam.step(), adam.zero_grad(); });
      {
        std::optional<dist::JoinableRef> model;
        if (sharded)
          model.emplace(*fsdp);
        else
          model.emplace(*ddp);
        Join join({*model, step});
        for (int i = 0; i < 3 + 3 * rank; ++i) {
          std::optional<FsdpModule::NoSync> fsdp_waits;
          std::optional<DistributedDataParallel<Mlp>::NoSync> ddp_waits;
          if (i % 2 == 0 && sharded) fsdp_waits.emplace(fsdp->runtime());
          if (i % 2 == 0 && !sharded) ddp_waits.emplace(ddp->reducer());
          const Tensor x = random_input({3, 5}, rank, i);
          (sharded ? (*fsdp)(x) : (*ddp)(x)).sum().backward();
          if (i % 2 == 1) step();
        }
      }
      std::vector<float> all;
      if (sharded)
        fsdp->for_each_full_parameter([&](const std::string&, const Tensor& t) {
          for (float v : floats(t)) all.push_back(v);
        });
      else
        all = values_of(m);
      if (rank > 0) return;
      if (!sharded)
        ddp_result = all;
      else
        EXPECT_EQ(all, ddp_result);
    });
  }
}

// A rank that steps where the others do not is an error on all, not parameters that differ.
TEST(Join, AStepOnSomeRanksOnly) {
  std::mutex mutex;
  int errors = 0;
  EXPECT_THROW(run_ranks(3,
                         [&](int rank) {
                           try {
                             Mlp m(4);
                             FullyShardedDataParallel fsdp(m);
                             JoinableStep step([] {});
                             Join join({fsdp, step});
                             for (int i = 0; i <= rank; ++i) {
                               fsdp(random_input({2, 4}, rank, i)).sum().backward();
                               if (i != 1 || rank != 2) step();
                             }
                           } catch (const Error& e) {
                             EXPECT_NE(std::string(e.what()).find("join"), std::string::npos)
                                 << e.what();
                             std::lock_guard lock(mutex);
                             ++errors;
                             throw;
                           }
                         }),
               Error);
  EXPECT_EQ(errors, 3);
}

}  // namespace
}  // namespace sherd::scenario
