// DistributedDataParallel: rows D of tests/scenarios/rows.txt. Expectations are made by one model
// in one process that sees all ranks' inputs.
#include "distributed/ddp.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <list>
#include <map>
#include <set>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "distributed/broadcast_coalesced.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

constexpr double kMiB = 1 << 20;

// Buckets of one or two parameters.
DdpOptions small_buckets() { return {.bucket_cap_mb = 64 / kMiB, .first_bucket_bytes = 32}; }

void expect_near(const Tensor& a, const Tensor& b, const std::string& what, double rtol = 1.3e-6,
                 double atol = 1e-5) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  const auto u = floats(a), v = floats(b);
  ASSERT_EQ(u.size(), v.size()) << what;
  for (size_t i = 0; i < u.size(); ++i)
    ASSERT_NEAR(u[i], v[i], atol + rtol * std::abs(v[i])) << what << " " << i;
}

// Gradients of two models with the same names.
void expect_same_gradients(const nn::Module& a, const nn::Module& b, const std::string& where) {
  const auto p = a.named_parameters(), q = b.named_parameters();
  ASSERT_EQ(p.size(), q.size());
  for (size_t i = 0; i < p.size(); ++i)
    expect_near(p[i].second.grad(), q[i].second.grad(), where + ", gradient of " + p[i].first);
}

// Adds up the branches that are asked for, innermost first: the order of use is that of `use`.
class Branches : public nn::Module {
 public:
  Branches()
      : a(add<nn::Linear>("a", 3, 3)),
        b(add<nn::Linear>("b", 3, 3)),
        c(add<nn::Linear>("c", 3, 3)) {}
  Tensor forward(const Tensor& x, const std::string& use) {
    Tensor y = x;
    for (char branch : use) y = branch == 'a' ? a(y) : branch == 'b' ? b(y) : c(y);
    return y;
  }
  nn::Child<nn::Linear> a, b, c;
};

// A DDP of Branches and, on each rank, one model that sees all ranks' inputs with 1/W of the loss.
struct Pair {
  Pair(const DdpOptions& o) {
    manual_seed(7);
    local.materialize();
    ddp = std::make_unique<DistributedDataParallel<Branches>>(model, o);
  }
  // use: by rank.
  void backward(int step, const std::vector<std::string>& use) {
    const int rank = dist::rank(), w = dist::world_size();
    (*ddp)(random_input({2, 3}, rank, step), use[rank]).sum().backward();
    for (int r = 0; r < w; ++r)
      (nn::call(local, random_input({2, 3}, r, step), use[r]).sum() * (1.0 / w)).backward();
  }
  Branches model, local;
  std::unique_ptr<DistributedDataParallel<Branches>> ddp;
};

TEST(Ddp, D_001_SplitBatchEqualsOneProcess) {
  for (const bool views : {false, true})
    run_ranks(2,
              [&](int rank) {
                manual_seed(7);
                Mlp m(8), whole(8);
                whole.materialize();
                DdpOptions o;
                o.gradient_as_bucket_view = views;
                DistributedDataParallel ddp(m, o);
                const Tensor x = random_input({6, 8}, 0, 0);
                nn::call(whole, x).mean().backward();
                ddp(x.narrow(0, 3 * rank, 3)).mean().backward();
                expect_same_gradients(m, whole, "rank " + std::to_string(rank));
                // Views of one bucket, or each with bytes of its own.
                std::set<Storage*> storages;
                for (auto& p : m.parameters()) storages.insert(p.grad().storage().get());
                EXPECT_EQ(storages.size(), views ? 1u : m.parameters().size());
              },
              {.backend = "gloo"});
}

TEST(Ddp, D_002_RanksThatUseOtherParameters) {
  for (const bool views : {false, true})
    for (const bool static_graph : {false, true})
      run_ranks(2, [&](int) {
        DdpOptions o = small_buckets();
        o.find_unused_parameters = true;
        o.gradient_as_bucket_view = views, o.static_graph = static_graph;
        Pair pair(o);
        for (int step = 0; step < 3; ++step) {
          pair.model.zero_grad(), pair.local.zero_grad();
          pair.backward(step, {"a", "b"});
          EXPECT_TRUE(pair.model.a->weight->grad().defined());
          EXPECT_TRUE(pair.model.b->weight->grad().defined());
          EXPECT_FALSE(pair.model.c->weight->grad().defined());
          expect_same_gradients(pair.model, pair.local, concat("step ", step));
        }
      });
  // All on one rank, a part on the others.
  run_ranks(3, [&](int) {
    DdpOptions o = small_buckets();
    o.find_unused_parameters = true;
    Pair pair(o);
    pair.backward(0, {"abc", "a", "c"});
    for (auto& [name, p] : pair.model.named_parameters()) EXPECT_TRUE(p.grad().defined()) << name;
    expect_same_gradients(pair.model, pair.local, "all on one rank");
  });
}

TEST(Ddp, D_003_UnusedParameterIsNamed) {
  run_ranks(2, [&](int rank) {
    Pair pair(small_buckets());
    pair.backward(0, {"abc", "abc"});
    try {
      pair.backward(1, {"ac", "ac"});
      ADD_FAILURE() << "b is unused, and nobody said so";
    } catch (const Error& e) {
      const std::string text = e.what();
      for (const std::string& part :
           {concat("rank ", rank), std::string("reduction of this step could not finish"),
            std::string("b.weight (index 2)"), std::string("b.bias (index 3)"),
            std::string("find_unused_parameters")})
        EXPECT_NE(text.find(part), std::string::npos) << text;
      for (const char* used : {"a.weight", "a.bias", "c.weight", "c.bias"})
        EXPECT_EQ(text.find(used), std::string::npos) << text;
    }
    // It happened before anything was sent: training goes on.
    pair.model.zero_grad(), pair.local.zero_grad();
    pair.backward(2, {"abc", "abc"});
    expect_same_gradients(pair.model, pair.local, "after the error");
  });
  // On one rank only: that rank says why, the other one learns that it is gone.
  try {
    run_ranks(2, [&](int) {
      Pair pair(small_buckets());
      pair.backward(0, {"abc", "abc"});
      pair.backward(1, {"abc", "ac"});
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("rank 1: [ddp] rank 1: the reduction"), std::string::npos) << text;
    EXPECT_NE(text.find("b.weight"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 0: "), std::string::npos) << text;
  }
}

TEST(Ddp, D_003_WhatIsFrozenAfterWrappingIsNotMissed) {
  run_ranks(2, [&](int) {
    Pair pair(small_buckets());
    for (int step = 0; step < 4; ++step) {
      const bool on = step % 2 == 0;
      for (Branches* m : {&pair.model, &pair.local}) {
        m->zero_grad();
        m->b->requires_grad_(on);
      }
      pair.backward(step, {"abc", "abc"});
      EXPECT_EQ(pair.model.b->weight->grad().defined(), on);
      expect_same_gradients(pair.model, pair.local, concat("step ", step));
    }
  });
}

TEST(Ddp, WhatIsThawedAfterWrappingIsRefused) {
  run_ranks(2, [&](int rank) {
    Branches m;
    m.b->requires_grad_(false);
    DistributedDataParallel ddp(m);
    const Tensor x = random_input({2, 3}, rank, 0);
    ddp(x, "abc").sum().backward();
    m.b->requires_grad_(true);
    expect_error([&] { ddp(x, "abc"); }, {"[ddp]", "b.weight", "was frozen", "wrap"});
  });
}

TEST(Ddp, APostAccumulateHookThatThrows) {
  run_ranks(2, [&](int rank) {
    Pair pair(small_buckets());
    bool throws = rank == 0;  // the other one makes its buckets anew after this step
    autograd::register_post_accumulate_grad_hook(pair.model.c->weight.get(), [&](const Tensor&) {
      if (throws) fail("not this gradient");
    });
    const auto first = [&] { pair.backward(0, {"abc", "abc"}); };
    if (rank == 0)
      expect_error(first, {"not this gradient"});
    else
      first();
    throws = false;
    for (int step = 1; step < 3; ++step) {
      pair.model.zero_grad(), pair.local.zero_grad();
      pair.backward(step, {"abc", "abc"});
      expect_same_gradients(pair.model, pair.local, concat("step ", step));
    }
  });
}

TEST(Ddp, D_004_UsageChangesFromStepToStep) {
  const std::vector<std::vector<std::string>> use = {{"abc", "abc"}, {"ab", "ab"}, {"a", "c"},
                                                     {"b", "abc"},   {"c", "c"},   {"ba", "b"}};
  for (const bool clears : {true, false})
    run_ranks(2, [&](int) {
      DdpOptions o = small_buckets();
      o.find_unused_parameters = true;
      Pair pair(o);
      for (int step = 0; step < 6; ++step) {
        if (clears && step % 2 == 0)
          for (auto* m : {&pair.model, &pair.local}) m->a->zero_grad(), m->b->zero_grad();
        pair.backward(step, use[size_t(step)]);
        expect_same_gradients(pair.model, pair.local, concat("step ", step));
      }
    });
}

TEST(Ddp, D_005_ForwardsWithoutBackward) {
  for (const bool unused : {false, true})
    run_ranks(2, [&](int rank) {
      DdpOptions o = small_buckets();
      o.find_unused_parameters = unused;
      Pair pair(o);
      const std::string use = unused ? "ac" : "abc";
      for (int step = 0; step < 4; ++step) (*pair.ddp)(random_input({2, 3}, rank, step), use);
      for (int step = 4; step < 8; ++step) pair.backward(step, {use, use});
      expect_same_gradients(pair.model, pair.local, unused ? "unused" : "all used");
    });
}

TEST(Ddp, D_007_StaticGraphThatChanges) {
  for (const bool used_first : {false, true})
    run_ranks(2, [&](int rank) {
      DdpOptions o = small_buckets();
      o.static_graph = true;
      Pair pair(o);
      const std::string first = used_first ? "abc" : "ac", second = used_first ? "ac" : "abc";
      for (int step = 0; step < 2; ++step) pair.backward(step, {first, first});
      expect_same_gradients(pair.model, pair.local, "static");
      expect_error(
          [&] {
            pair.backward(2, {second, second});
          },
          {concat("rank ", rank), "the graph changed", "b.weight (index 2)",
           used_first ? "was used in the first step and is not now"
                      : "is used now and was not in the first step",
           "static_graph"});
    });
}

TEST(Ddp, UnevenNumbersOfBatchesAreExplained) {
  std::string text;
  run_ranks(2, [&](int rank) {
    nn::Linear m(2, 2);
    DistributedDataParallel ddp(m);
    const auto step = [&] { ddp(random_input({1, 2}, rank, 0)).sum().backward(); };
    step();
    if (rank == 0) return;
    try {
      step();
    } catch (const Error& e) {
      text = e.what();
    }
  });
  EXPECT_NE(text.find("rank 0 left it after #"), std::string::npos) << text;
  EXPECT_TRUE(
      text.ends_with("equal numbers of batches, or ddp.join() around their loops "
                     "(docs/ddp.md)"))
      << text;
}

TEST(Ddp, D_008_ModelsThatDiffer) {
  for (const bool one_more : {false, true})
    run_ranks(3, [&](int rank) {
      nn::Sequential m(nn::Embedding(!one_more && rank == 1 ? 11 : 10, 4), nn::Linear(4, 2));
      if (one_more && rank == 1) m.append(nn::Linear(2, 2));
      expect_error([&] { DistributedDataParallel ddp(m); },
                   {"different models", "rank 0", "rank 1", one_more ? "2.weight" : "0.weight"});
    });
  // What is wrong on one rank alone is an error on all.
  run_ranks(3, [](int rank) {
    nn::Linear m(2, 2);
    m.requires_grad_(rank != 1);
    expect_error([&] { DistributedDataParallel ddp(m); },
                 {"rank 1", "no parameter that requires a gradient"});
  });
}

TEST(Ddp, D_009_BucketAssignment) {
  using Buckets = std::vector<std::vector<int>>;
  const auto f32 = [](std::vector<int64_t> n) {
    for (auto& x : n) x *= 4;
    return n;
  };
  const std::vector<DType> four(4, kFloat32),
      alternating = {kFloat32, kFloat64, kFloat32, kFloat64, kFloat32, kFloat64};
  const std::vector<int64_t> two_hundred(6, 200);  // 50 float32, 25 float64
  EXPECT_EQ(dist::assign_buckets(f32({100, 200, 100, 50}), four, 400, 400),
            (Buckets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(dist::assign_buckets(two_hundred, alternating, 400, 400),
            (Buckets{{0, 2}, {1, 3}, {4}, {5}}));
  EXPECT_EQ(dist::assign_buckets(f32({10, 10, 10, 10}), four, 40, 80), (Buckets{{0}, {1, 2}, {3}}));
  EXPECT_EQ(dist::assign_buckets(two_hundred, alternating, 200, 400),
            (Buckets{{0}, {1}, {2, 4}, {3, 5}}));
  // Of a model with two dtypes.
  run_ranks(1, [](int) {
    nn::Sequential m(nn::Linear(4, 4), nn::Linear(4, 4, {.dtype = kFloat64}), nn::Linear(4, 4));
    DistributedDataParallel ddp(m);
    EXPECT_EQ(ddp.reducer()->bucket_names(),
              (std::vector<std::vector<std::string>>{{"2.bias", "2.weight", "0.bias", "0.weight"},
                                                     {"1.bias", "1.weight"}}));
  });
  run_ranks(1, [](int) {
    nn::Linear m(2, 2);
    expect_error([&] { DistributedDataParallel(m, {.bucket_cap_mb = 0}); }, {"bucket_cap_mb"});
    expect_error([&] { DistributedDataParallel(m, {.bucket_cap_mb = NAN}); }, {"bucket_cap_mb"});
    expect_error([&] { DistributedDataParallel(m, {.first_bucket_bytes = 0}); },
                 {"first_bucket_bytes"});
  });
}

// Declared a, b, c and used b, a, c: the guess is c, b, a, and what happens is c, a, b.
TEST(Ddp, BucketsAreMadeAnewInTheOrderOfTheFirstStep) {
  for (const bool find_unused : {false, true}) {
    std::vector<std::vector<float>> gradients;  // of rank 0, small buckets and a large one
    for (const bool small : {true, false})
      run_ranks(3, [&](int rank) {
        DdpOptions o = small ? small_buckets() : DdpOptions{};
        o.find_unused_parameters = find_unused;
        Pair pair(o);
        const auto first_letters = [&] {
          std::string letters;
          for (auto& names : pair.ddp->reducer()->bucket_names())
            for (auto& name : names)
              if (letters.empty() || letters.back() != name[0]) letters += name[0];
          return letters;
        };
        EXPECT_EQ(first_letters(), "cba");
        {
          const auto waits = pair.ddp->no_sync();
          pair.backward(0, {"bac", "bac", "bac"});
        }
        EXPECT_EQ(first_letters(), "cba");
        for (int step = 1; step < 4; ++step) {
          pair.backward(step, {"bac", "bac", "bac"});
          EXPECT_EQ(first_letters(), small && !find_unused ? "cab" : "cba");
          expect_same_gradients(pair.model, pair.local, concat("step ", step));
        }
        if (rank > 0) return;
        gradients.emplace_back();
        for (const Tensor& p : pair.model.parameters())
          for (float v : floats(p.grad())) gradients.back().push_back(v);
      });
    EXPECT_EQ(gradients[0], gradients[1]);
  }
}

// Ranks whose gradients come in other orders agree on rank 0's.
TEST(Ddp, BucketsAreMadeInOneOrderOnAllRanks) {
  run_ranks(3, [](int) {
    Pair pair(small_buckets());
    const std::vector<std::string> use = {"bac", "cab", "abc"};
    for (int step = 0; step < 3; ++step) {
      pair.model.zero_grad(), pair.local.zero_grad();
      pair.backward(step, use);
      expect_same_gradients(pair.model, pair.local, concat("step ", step));
      const auto names = pair.ddp->reducer()->bucket_names();
      EXPECT_EQ(names.front()[0][0], 'c');
      EXPECT_EQ(names.back()[0][0], 'b');
    }
  });
}

TEST(Ddp, D_011_BroadcastInChunks) {
  const auto make = [](int rank) {
    std::vector<Tensor> all = {random_input({3, 5}, rank, 0),
                               to_raw(random_input({7}, rank, 1), kBFloat16),
                               random_input({0}, rank, 2),
                               random_input({4, 6}, rank, 3).t(),
                               to_raw(random_input({1}, rank, 4), kFloat64),
                               to_raw(random_input({40}, rank, 5), kFloat16),
                               full({3}, rank, kInt64),
                               random_input({}, rank, 6)};
    return all;
  };
  for (const int root : {0, 1})
    for (const int64_t bytes : {16, 100, 100000})
      run_ranks(3, [&](int rank) {
        auto mine = make(rank), expected = make(root);
        Tensor same = full({2}, 5);  // on all ranks
        mine.push_back(same);
        const uint32_t before = same.version();
        dist::broadcast_coalesced(dist::default_group(), mine, root, "test", bytes);
        for (size_t i = 0; i < expected.size(); ++i) {
          const Tensor a = contiguous_raw(mine[i]), b = contiguous_raw(expected[i]);
          ASSERT_EQ(a.dtype(), b.dtype());
          EXPECT_TRUE(a.numel() == 0 || std::memcmp(a.bytes(), b.bytes(), a.nbytes()) == 0)
              << "tensor " << i << ", root " << root << ", rank " << rank;
        }
        // What the root's values were already is not a change, unless it was sent by itself.
        if (bytes > 16) {
          EXPECT_EQ(same.version(), before);
        }
      });
  // At construction: other values on each rank, then rank 0's on all.
  run_ranks(3, [&](int rank) {
    const auto fresh = [](int seed) {
      manual_seed(uint64_t(seed));
      auto m = std::make_unique<nn::Sequential>(
          nn::Linear(5, 3), nn::Linear(3, 4, {.dtype = kBFloat16}), nn::Linear(4, 2));
      m->materialize();
      return m;
    };
    const auto m = fresh(100 + rank), first = fresh(100);
    if (rank > 0) {
      EXPECT_NE(floats(m->parameters()[0]), floats(first->parameters()[0]));
    }
    DistributedDataParallel ddp(*m);
    for (size_t i = 0; i < first->parameters().size(); ++i)
      EXPECT_EQ(floats(m->parameters()[i]), floats(first->parameters()[i])) << i;
  });
}

// Counts its training forwards in a buffer, which also enters the result.
class Counting : public nn::Module {
 public:
  Counting()
      : linear(add<nn::Linear>("linear", 3, 3)),
        seen(buffer("seen", zeros({2}))),
        frozen(buffer("frozen", ones({2}, kInt64))) {}
  Tensor forward(const Tensor& x) {
    if (is_training()) {
      NoGrad off;
      Tensor s = seen;
      s.add_(Tensor(1.0));
    }
    return linear(x) * (seen.get().narrow(0, 0, 1));
  }
  nn::Child<nn::Linear> linear;
  nn::Buffer seen, frozen;
};

TEST(Ddp, BuffersAreRankZerosBeforeEachForwardThatTrains) {
  run_ranks(2, [](int rank) {
    Counting m;
    DistributedDataParallel ddp(m);
    const Tensor x = random_input({2, 3}, rank, 0);
    const auto shows = [&](float expected, const char* when) {
      EXPECT_EQ(m.seen->data<float>()[0], expected) << when << ", rank " << rank;
    };
    const auto own = [&](double value) {
      Tensor s = m.seen;
      s.fill_(value);
    };
    own(10 + rank);
    ddp(x).sum().backward();
    shows(11, "synced");
    own(20 + rank);
    {
      const auto waits = ddp.no_sync();
      ddp(x).sum().backward();
      shows(21, "first of an accumulation");
      own(30 + rank);
      ddp(x).sum().backward();
      shows(float(31 + rank), "second of an accumulation");
    }
    own(40 + rank);
    ddp(x).sum().backward();
    shows(float(41 + rank), "last of an accumulation");
    ddp(x).sum().backward();
    shows(42, "after it");
  });
  run_ranks(2, [](int rank) {
    Counting m;
    DistributedDataParallel ddp(m, {.broadcast_buffers = false});
    Tensor s = m.seen;
    s.fill_(10 + rank);
    ddp(random_input({2, 3}, rank, 0)).sum().backward();
    EXPECT_EQ(s.data<float>()[0], float(11 + rank));
  });
}

// Two forwards before a backward: a buffer that nobody changed meanwhile is not written again.
TEST(Ddp, BroadcastOfUnchangedBuffersKeepsWhatBackwardSaved) {
  class Scaled : public nn::Module {
   public:
    Scaled()
        : linear(add<nn::Linear>("linear", 3, 3)),
          scale(buffer("scale", full({3}, 2))),
          table(buffer("table", full({200000, 3}, 1))) {}  // 2.3 MiB: in a message of its own
    Tensor forward(const Tensor& x) {
      return linear(x) * scale.get() * table.get().narrow(0, 0, 2);
    }
    nn::Child<nn::Linear> linear;
    nn::Buffer scale, table;
  };
  run_ranks(2, [](int rank) {
    Scaled m;
    DistributedDataParallel ddp(m);
    const Tensor first = ddp(random_input({2, 3}, rank, 0)),
                 second = ddp(random_input({2, 3}, rank, 1));
    (first.sum() + second.sum()).backward();
    EXPECT_EQ(floats(m.linear->bias->grad()), std::vector<float>(3, 8));
  });
}

TEST(Ddp, D_013_EvaluationOnOneRankAlone) {
  run_ranks(2, [](int rank) {
    manual_seed(7);
    Counting m, local;
    local.materialize();
    DistributedDataParallel ddp(m);
    const Tensor x = random_input({2, 3}, 0, 0);
    const auto before = dist::default_group()->sequence_number();
    if (rank == 0) {
      m.eval(), local.eval();
      EXPECT_EQ(floats(ddp(x)), floats(nn::call(local, x)));
      m.train(), local.train();
      NoGrad off;
      EXPECT_EQ(floats(ddp(x)), floats(nn::call(local, x)));
      EXPECT_EQ(dist::default_group()->sequence_number(), before);
    }
    ddp(random_input({2, 3}, rank, 1)).sum().backward();
    EXPECT_EQ(m.seen->data<float>()[0], 2);  // rank 0's
  });
}

TEST(Ddp, D_014_Accumulation) {
  for (const int k : {2, 3, 4})
    run_ranks(2, [&](int rank) {
      manual_seed(7);
      Mlp m(4), whole(4);
      whole.materialize();
      DistributedDataParallel ddp(m, small_buckets());
      for (int step = 0; step < 3; ++step) {
        m.zero_grad(), whole.zero_grad();
        std::vector<Tensor> all;
        const auto before = dist::default_group()->sequence_number();
        for (int micro = 0; micro < k; ++micro) {
          std::optional<DistributedDataParallel<Mlp>::NoSync> waits;
          if (micro + 1 < k) {
            EXPECT_EQ(dist::default_group()->sequence_number(), before);
            waits.emplace(ddp.reducer());
          }
          (ddp(random_input({3, 4}, rank, 10 * step + micro)).mean() * (1.0 / k)).backward();
          for (int r = 0; r < 2; ++r) all.push_back(random_input({3, 4}, r, 10 * step + micro));
        }
        EXPECT_GT(dist::default_group()->sequence_number(), before);
        nn::call(whole, cat(all)).mean().backward();
        expect_same_gradients(m, whole, concat("k ", k, ", step ", step));
      }
    });
}

// What a forward may be given.
struct Inputs {
  Tensor x;
  std::map<std::string, Tensor> more;
};
class Own {  // a type of the user's: no aggregate, not copyable
 public:
  explicit Own(Tensor t) : tensor(std::move(t)) {}
  Own(const Own&) = delete;
  Tensor tensor;
};
class TakesAnything : public nn::Module {
 public:
  TakesAnything() : linear(add<nn::Linear>("linear", 3, 1)) {}
  Tensor forward(const std::tuple<Tensor, std::list<Tensor>>& a, const Inputs& b, Own& own) {
    seen = &own;
    return linear(std::get<0>(a) + std::get<1>(a).front() + b.x + b.more.at("y") + own.tensor);
  }
  nn::Child<nn::Linear> linear;
  Own* seen = nullptr;
};

TEST(Ddp, D_015_InputsOfAnyShapeAreMoved) {
  run_ranks(1, [](int) {
    TakesAnything m;
    DistributedDataParallel ddp(m);
    EXPECT_EQ(ddp.reducer()->device(), kCPU);
    const Tensor x = random_input({2, 3}, 0, 0);
    Own own(x);
    const Tensor y = ddp(std::tuple(x, std::list<Tensor>{x}), Inputs{x, {{"y", x}}}, own);
    EXPECT_EQ(m.seen, &own);
    EXPECT_EQ(floats(y), floats(nn::call(*m.linear, x * 5.0)));
  });
  // To another device: the meta device stands for an accelerator.
  const Tensor x = random_input({2, 3}, 0, 0), there = empty({2}, kFloat32, kMeta);
  Own own(x);
  auto inputs = std::tuple<std::tuple<Tensor, std::list<Tensor>>, Inputs, Own&, int>(
      {x, {x, x}}, {x, {{"y", x}, {"z", there}}}, own, 3);
  dist::move_tensors(inputs, kMeta);
  EXPECT_EQ(std::get<0>(std::get<0>(inputs)).device(), kMeta);
  for (auto& t : std::get<1>(std::get<0>(inputs))) EXPECT_EQ(t.device(), kMeta);
  EXPECT_EQ(std::get<1>(inputs).x.device(), kMeta);
  EXPECT_EQ(std::get<1>(inputs).more.at("y").device(), kMeta);
  EXPECT_TRUE(std::get<1>(inputs).more.at("z").is_same(there));
  EXPECT_EQ(own.tensor.device(), kCPU);
  EXPECT_EQ(std::get<3>(inputs), 3);
}

}  // namespace
}  // namespace sherd::scenario
