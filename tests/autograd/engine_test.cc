// The engine: order, accumulation, hooks, scopes, sinks, plans, checkpointing, and its errors.
#include "autograd/engine.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <thread>

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "autograd/record.h"
#include "core/generator.h"

namespace sherd {
using autograd::Needs, autograd::record;
namespace {

std::vector<double> values(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t, kFloat64));
  return {c.data<double>(), c.data<double>() + c.numel()};
}
Tensor leaf(const Dims& sizes, double value = 2) {
  return full(sizes, value, kFloat64).set_requires_grad();
}
template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
#define EXPECT_SAYS(statement, part)                                      \
  EXPECT_NE(message_of([&] { statement; }).find(part), std::string::npos) \
      << message_of([&] { statement; })

// Of fused ops, whose backwards are a graph of their own then: the same tensor twice, inputs that
// depend on each other, hooks on them.
TEST(Engine, CreateGraphChangesNoGradient) {
  const auto gradient = [](const std::function<Tensor(const Tensor&)>& f, const Dims& sizes,
                           bool create_graph) {
    Tensor x = empty(sizes, kFloat64);
    for (int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = std::sin(double(i * i + 1));
    x.set_requires_grad();
    const Tensor y = f(x);
    Tensor c = empty(y.sizes(), kFloat64);
    for (int64_t i = 0; i < c.numel(); ++i) c.data<double>()[i] = std::cos(double(3 * i));
    return values(grad({y}, {x}, {c}, {.create_graph = create_graph})[0]);
  };
  const auto expect_same = [&](const std::function<Tensor(const Tensor&)>& f, const Dims& sizes,
                               const char* what) {
    const auto want = gradient(f, sizes, false), got = gradient(f, sizes, true);
    ASSERT_EQ(want.size(), got.size());
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(want[i], got[i], 1e-12) << what;
  };
  const Dims four{1, 2, 3, 4};
  const auto attend = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return scaled_dot_product_attention(q, k, v);
  };
  expect_same([&](const Tensor& x) { return attend(x, x, x); }, four, "q = k = v");
  expect_same([&](const Tensor& x) { return attend(x, x * 2, x * 3); }, four, "dependent");
  expect_same([](const Tensor& x) { return layer_norm(x, {3}, x.select(0, 0), x.select(0, 1)); },
              {2, 3}, "layer_norm of its weight");
  expect_same([](const Tensor& x) { return layer_norm(x, {3}, x * 2, x); }, {3}, "and dependent");
  const auto hooked = [](const Tensor& x) {
    const Tensor y = x * 1;
    autograd::register_hook(y, [](const Tensor& g) { return g * 10; });
    return y;
  };
  expect_same([](const Tensor& x) { return pow(abs(x) + 1, 2.1079150850612667); }, four, "pow");
  expect_same([&](const Tensor& x) { return attend(hooked(x), x, x); }, four, "hook");
  expect_same([&](const Tensor& x) { return layer_norm(hooked(x), {3}); }, {2, 3}, "hook");
  expect_same([&](const Tensor& x) { return packed_self_attention(hooked(x), 1); }, {1, 2, 6},
              "hook");
  expect_same(
      [&](const Tensor& x) {
        return cross_entropy(hooked(x), tensor<int64_t>({1, 0}));
      },
      {2, 3}, "hook");
}

TEST(Engine, GradRunsTheHooksOfItsInputs) {
  const Tensor w = leaf({1}, 3);
  autograd::register_hook(w, [](const Tensor& g) { return g * 10; });
  EXPECT_EQ(values(grad({(w * 2).sum()}, {w})[0]), (std::vector<double>{20}));
}

TEST(Engine, AHookOfGradThatThrowsEndsTheBackward) {
  struct Watch : autograd::BackwardObserver {
    int ended = 0;
    bool on_plan(const autograd::Plan&) override { return true; }
    void on_end(bool failed) override { ended += failed; }
  } watch;
  autograd::add_observer(&watch);
  const Tensor w = leaf({1}, 3);
  autograd::register_hook(w, [](const Tensor&) -> Tensor { fail("no"); });
  EXPECT_SAYS(grad({(w * 2).sum()}, {w}), "no");
  EXPECT_EQ(watch.ended, 1);
  autograd::remove_observer(&watch);
}

TEST(Engine, AHookMayAddHooks) {
  const Tensor w = leaf({1}, 3), y = w * 2;
  int calls = 0;
  const auto adding = [&calls](const Tensor& t) {
    return [&calls, &t](const Tensor& g) {
      for (int i = 0; i < 100; ++i)
        autograd::register_hook(t, [&calls](const Tensor& of) { return ++calls, of; });
      return g;
    };
  };
  autograd::register_hook(w, adding(w));
  autograd::register_hook(y, adding(y));
  y.sum().backward();
  EXPECT_EQ(calls, 0);  // they take part from the next backward on
}

TEST(Engine, PostAccumulateHooksRunOnlyWhereSomethingWasAccumulated) {
  const Tensor a = leaf({1}), b = leaf({1});
  int calls = 0;
  for (const Tensor& t : {a, b}) {
    t.set_grad(full({1}, 1, kFloat64));
    autograd::register_post_accumulate_grad_hook(t, [&](const Tensor&) { ++calls; });
  }
  const Tensor y = record("first", full({1}, 1, kFloat64), {&a, &b}, [](const Tensor& g, Needs) {
    return std::array<Tensor, 2>{g, {}};
  });
  y.backward();
  EXPECT_EQ(calls, 1);
}

TEST(Engine, APostAccumulateHookMaySetTheGradientToNone) {
  const Tensor a = leaf({1});
  double seen = 0;
  autograd::register_post_accumulate_grad_hook(a, [&](const Tensor&) { a.set_grad({}); });
  autograd::register_post_accumulate_grad_hook(a, [&](const Tensor& g) { seen = g.item(); });
  (a * 3).sum().backward();
  EXPECT_EQ(seen, 3);
  EXPECT_FALSE(a.grad().defined());
}

TEST(Engine, GradientsAreOfTheOutputsDtype) {
  const Tensor x = full({2}, 3).set_requires_grad();
  (x * 2).backward(full({2}, 1, kFloat64));
  EXPECT_EQ(x.grad().dtype(), kFloat32);
  x.set_grad({});
  x.reshape({2}).backward(full({2}, 3, kInt64));
  EXPECT_EQ(x.grad().dtype(), kFloat32);
  EXPECT_EQ(values(x.grad()), (std::vector<double>{3, 3}));
  EXPECT_SAYS((x * 2).backward(empty({2}, kFloat32, kMeta)), "meta");
  EXPECT_SAYS(x.set_grad(full({2}, 1, kInt64)), "int64");
  EXPECT_SAYS(x.set_grad(empty({2}, kFloat32, kMeta)), "meta");
}

TEST(Engine, AccumulatesIntoLeaves) {
  const Tensor x = leaf({3});
  (x * x).sum().backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{4, 4, 4}));
  (x * 3).sum().backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{7, 7, 7}));
  x.set_grad({});
  EXPECT_FALSE(x.grad().defined());
}

TEST(Engine, BranchesAndReuse) {
  const Tensor x = leaf({2}), y = leaf({2}, 3);
  const Tensor a = x * y, b = a + x, c = (a * b).sum();  // xy(xy + x)
  c.backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{2 * 2 * 9 + 2 * 2 * 3, 48}));
  EXPECT_EQ(values(y.grad()), (std::vector<double>{2 * 4 * 3 + 4, 28}));
}

TEST(Engine, AResidualOfNothingHasAGradient) {
  const Tensor x = leaf({0, 3}), h = x * 2;
  (h + exp(h)).sum().backward();  // the sum's gradient is expanded, and added to
  EXPECT_EQ(x.grad().sizes(), (Dims{0, 3}));
}

TEST(Engine, SecondBackwardNeedsRetainGraph) {
  const Tensor x = leaf({2});
  const Tensor y = (x * x).sum();
  y.backward({}, true);
  y.backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{8, 8}));
  EXPECT_SAYS(y.backward(), "freed");
  EXPECT_SAYS(y.backward(), "[sum]");
}

TEST(Engine, InPlaceChangeOfASavedValueNamesTheOp) {
  const Tensor x = leaf({2});
  Tensor a = x * 1;
  const Tensor y = a * a;
  a.add_(1);
  EXPECT_SAYS(y.sum().backward(), "[mul]");
  EXPECT_SAYS(y.sum().backward(), "in place");
}

TEST(Engine, VersionsBelongToTheViewFamilyNotTheStorage) {
  const Tensor flat = zeros({4}, kFloat64);
  const Tensor a = over_storage(flat.storage(), {2}, kFloat64, 0).set_requires_grad();
  Tensor b = over_storage(flat.storage(), {2}, kFloat64, 2);
  const Tensor y = (a * a).sum();
  b.fill_(7);  // a neighbour in the same storage
  y.backward();
  EXPECT_EQ(values(a.grad()), (std::vector<double>{0, 0}));
}

TEST(Engine, ReleasedBytesAreNamed) {
  const Tensor x = leaf({2});
  const Tensor a = x * 1, y = a * a;
  a.storage()->release();
  EXPECT_SAYS(y.sum().backward(), "released");
}

TEST(Engine, NoGradRecordsNothing) {
  const Tensor x = leaf({2});
  NoGrad off;
  EXPECT_FALSE((x * 2).requires_grad());
}

TEST(Engine, GradLeavesLeavesAlone) {
  const Tensor x = leaf({2}), z = leaf({2});
  const Tensor y = x * x * 3;
  const auto g = grad({y.sum()}, {x});
  EXPECT_EQ(values(g[0]), (std::vector<double>{12, 12}));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_SAYS(grad({(x * 2).sum()}, {z}), "do not depend on input 0");
  EXPECT_FALSE(grad({(x * 2).sum()}, {z}, {}, {.allow_unused = true})[0].defined());
}

TEST(Engine, GradOfAResult) {
  const Tensor x = leaf({2});
  const Tensor a = x * 2, y = (a * a).sum();
  EXPECT_EQ(values(grad({y}, {a})[0]), (std::vector<double>{8, 8}));
}

TEST(Engine, SecondDerivative) {
  const Tensor x = leaf({1});
  const Tensor first = grad({x * x * x}, {x}, {ones({1}, kFloat64)}, {.create_graph = true})[0];
  EXPECT_EQ(values(grad({first.sum()}, {x})[0]), (std::vector<double>{12}));
}

TEST(Engine, GradcheckFindsAWrongDerivative) {
  const TensorsFunction f = [](const std::vector<Tensor>& in) {
    Tensor y;
    {
      NoGrad off;
      y = in[0] * in[0];
    }
    return std::vector<Tensor>{
        record<1>("wrong", y, {&in[0]}, [](const Tensor& g, Needs) { return std::array{g * 3}; })};
  };
  EXPECT_SAYS(gradcheck(f, {full({2}, 2, kFloat64)}), "[gradcheck] input 0, element 0");
}

TEST(Engine, NodesRunInFallingOrder) {
  std::vector<int> order;
  auto mark = [&](const Tensor& x, int i) {
    return record<1>("mark", x.detach(), {&x}, [&order, i](const Tensor& g, Needs) {
      order.push_back(i);
      return std::array{g};
    });
  };
  const Tensor x = leaf({1});
  const Tensor a = mark(x, 0), b = mark(x, 1), c = mark(a, 2), d = mark(b, 3), e = mark(a, 4);
  (d + c + e + b).sum().backward();
  EXPECT_EQ(order, (std::vector<int>{4, 3, 2, 1, 0}));
  EXPECT_EQ(values(x.grad()), (std::vector<double>{4}));
}

TEST(Engine, HooksOnLeavesAndResults) {
  const Tensor x = leaf({1});
  const Tensor a = x * 2;
  int post = 0;
  autograd::register_hook(a, [](const Tensor& g) { return g * 10; });
  autograd::register_hook(x, [](const Tensor& g) { return g + 1; });
  autograd::register_post_accumulate_grad_hook(x, [&](const Tensor& g) {
    ++post;
    EXPECT_EQ(g.item(), 10 * 2 + 10 * 2 + 1);
  });
  (a + a * 1).sum().backward();
  EXPECT_EQ(x.grad().item(), 41);  // the hook on x sees the whole sum once
  EXPECT_EQ(post, 1);
}

TEST(Engine, HooksKeepShapeAndDtype) {
  const std::pair<Tensor, std::string> bad[] = {
      {ones({2}, kFloat64), "[2] float64 for one of [1] float64"},
      {ones({1}), "[1] float32 for one of"}};
  for (auto& [other, text] : bad)
    for (bool on_leaf : {false, true}) {
      const Tensor x = leaf({1});
      const Tensor a = x * 2;
      autograd::register_hook(on_leaf ? x : a, [o = other](const Tensor&) { return o; });
      try {
        a.sum().backward();
        ADD_FAILURE() << text;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
      }
      EXPECT_FALSE(x.grad().defined());
    }
}

struct TracingScope : autograd::Scope {
  std::vector<std::string>* trace;
  std::string name;
  TracingScope(std::vector<std::string>* t, std::string n) : trace(t), name(std::move(n)) {}
  void on_enter() override { trace->push_back("enter " + name); }
  void on_leave() override { trace->push_back("leave " + name); }
  void on_recomputed() override { trace->push_back("recomputed " + name); }
};

TEST(Engine, ScopesAreEnteredAndLeftOnce) {
  std::vector<std::string> trace;
  auto node = [&](const Tensor& x, std::string name) {
    return record<1>("step", x.detach(), {&x}, [&trace, name](const Tensor& g, Needs) {
      trace.push_back(name);
      return std::array{g};
    });
  };
  const Tensor x = leaf({1});
  Tensor y;
  {
    autograd::ScopeGuard root(make_ref<TracingScope>(&trace, "root"));
    y = node(x, "first");
    {
      autograd::ScopeGuard a(make_ref<TracingScope>(&trace, "a"));
      y = node(y, "a1");
      y = node(y, "a2");
    }
    {
      autograd::ScopeGuard b(make_ref<TracingScope>(&trace, "b"));
      y = node(y, "b1");
    }
    y = node(y, "last");
  }
  y.backward({}, true);
  const std::vector<std::string> once{"enter root", "last",    "enter b",   "b1",
                                      "leave b",    "enter a", "a2",        "a1",
                                      "leave a",    "first",   "leave root"};
  EXPECT_EQ(trace, once);
  trace.clear();
  y.backward();  // a scope lives with its nodes, not with a backward
  EXPECT_EQ(trace, once);
}

struct FlatSink : autograd::GradSink {
  Tensor buffer;
  bool written = false, offers = true;
  int accepted = 0, completed = 0;
  Destination destination(autograd::AutogradMeta&, DType dtype) override {
    if (!offers || dtype != buffer.dtype()) return {};
    return {buffer, std::exchange(written, true)};
  }
  void accept(autograd::AutogradMeta&, const Tensor& g) override {
    ++accepted;
    NoGrad off;
    if (std::exchange(written, true))
      buffer.add_(g);
    else
      buffer.copy_(g);
  }
  void complete(autograd::AutogradMeta&) override { ++completed; }
};

TEST(Engine, SinksTakeGradientsAndProductsWriteIntoThem) {
  for (bool offers : {true, false}) {
    const Tensor w = full({2, 3}, 0.5, kFloat64).set_requires_grad();
    auto sink = std::make_shared<FlatSink>();
    sink->buffer = full({2, 3}, 99, kFloat64);
    sink->offers = offers;
    autograd::make_meta(w).sink = sink;
    const Tensor x = full({4, 3}, 2, kFloat64);
    (linear(x, w).sum() + linear(x, w).sum() + w.sum()).backward();
    EXPECT_EQ(values(sink->buffer), std::vector<double>(6, 8 + 8 + 1));
    EXPECT_EQ(sink->accepted, offers ? 1 : 3);
    EXPECT_EQ(sink->completed, 1);
    EXPECT_FALSE(w.grad().defined());
  }
}

struct Watcher : autograd::BackwardObserver {
  std::vector<int> contributions;
  std::vector<std::string> scopes;
  int ends = 0, failures = 0;
  Watcher() { autograd::add_observer(this); }
  ~Watcher() override { autograd::remove_observer(this); }
  bool on_plan(const autograd::Plan& plan) override {
    contributions.clear(), scopes.clear();
    for (auto& [leaf, n] : plan.leaves) contributions.push_back(n);
    for (auto& item : plan.scopes)
      scopes.push_back(static_cast<TracingScope*>(item.scope)->name + (item.recomputed ? "*" : ""));
    return true;
  }
  void on_end(bool failed) override { ++ends, failures += failed; }
};

TEST(Engine, PlanCountsContributions) {
  Watcher watcher;
  const Tensor x = leaf({1});
  (x * 2 + x * 3 + x).sum().backward();
  EXPECT_EQ(watcher.contributions, std::vector<int>{3});
  const Tensor y = record<1>("throws", x.detach(), {&x}, [](const Tensor& g, Needs) {
    fail("no");
    return std::array{g};
  });
  EXPECT_THROW(y.backward(), Error);
  EXPECT_EQ(watcher.ends, 2);
  EXPECT_EQ(watcher.failures, 1);
}

TEST(Checkpoint, SameBitsAndScopesInThePlan) {
  std::vector<std::string> trace;
  const Tensor w = leaf({2, 2}, 0.3), x = leaf({2, 2}, 0.7);
  auto block = [&](const Tensor& h) {
    autograd::ScopeGuard guard(make_ref<TracingScope>(&trace, "block"));
    return dropout(tanh(linear(h, w)), 0.5) + h;
  };
  manual_seed(5);
  (block(x) * 2).sum().backward();
  const auto gw = values(w.grad()), gx = values(x.grad());
  w.set_grad({}), x.set_grad({});
  trace.clear();
  Watcher watcher;
  manual_seed(5);
  (checkpoint(block, x) * 2).sum().backward();
  EXPECT_EQ(values(w.grad()), gw);
  EXPECT_EQ(values(x.grad()), gx);
  EXPECT_EQ(watcher.scopes, std::vector<std::string>{"block*"});
  EXPECT_EQ(trace, (std::vector<std::string>{"enter block", "leave block", "recomputed block"}));
}

TEST(Checkpoint, LeafInTwoRegionsCompletesOnce) {
  const Tensor w = leaf({2, 2}, 0.3);
  auto sink = std::make_shared<FlatSink>();
  sink->buffer = zeros({2, 2}, kFloat64);
  autograd::make_meta(w).sink = sink;
  auto f = [&](const Tensor& h) { return linear(h, w); };
  const Tensor x = full({2, 2}, 1, kFloat64);  // needs no gradient: the region still does
  checkpoint(f, checkpoint(f, x)).sum().backward();
  EXPECT_EQ(sink->completed, 1);
  const Tensor v = leaf({2, 2}, 0.3);
  linear(linear(x, v), v).sum().backward();
  EXPECT_EQ(values(sink->buffer), values(v.grad()));
}

TEST(Engine, ObserversHearTheEndOfTheirOwnBackwardsOnly) {
  struct Picky : Watcher {
    bool on_plan(const autograd::Plan& plan) override {
      Watcher::on_plan(plan);
      return plan.leaves.size() == 2;
    }
  } watcher;
  const Tensor x = leaf({1}), y = leaf({1}), z = leaf({1});
  const Tensor inner = (z * z).sum();
  const Tensor out = record<1>("inner grad", x.detach(), {&x}, [&](const Tensor& g, Needs) {
    grad({inner}, {z}, {}, {.retain_graph = true});  // another graph's
    return std::array{g};
  });
  (out * y).sum().backward();
  EXPECT_EQ(watcher.ends, 1);
  EXPECT_EQ(x.grad().item(), 2);
}

TEST(Engine, AfterHooksReplaceWhatASinkWouldHaveBeenGiven) {
  const Tensor w = full({2, 3}, 0.5, kFloat64).set_requires_grad();
  auto sink = std::make_shared<FlatSink>();
  sink->buffer = full({2, 3}, 99, kFloat64);
  autograd::make_meta(w).sink = sink;
  const Tensor y = linear(full({4, 3}, 2, kFloat64), w);
  autograd::meta_of(y)->grad_fn->hooks().after.push_back(
      [](std::span<const Tensor>, std::span<Tensor> out) { out[1] = out[1] * 1; });
  y.sum().backward();
  EXPECT_EQ(values(sink->buffer), std::vector<double>(6, 8));
}

TEST(Engine, CreateGraphGivesEachLeafAGradientOfItsOwn) {
  const Tensor a = leaf({2}), b = leaf({2});
  ((a + b) * 10).sum().backward({}, true, true);
  EXPECT_NE(a.grad().storage().get(), b.grad().storage().get());
}

TEST(Checkpoint, ResultsFromOutsideGetTheirGradients) {
  for (bool outside_too : {false, true}) {
    const Tensor w = leaf({2}), h = leaf({2}, 5), v = leaf({2}), k = leaf({2}, 5);
    const Tensor a = w * 3;
    const Tensor y = checkpoint([&](const Tensor& t) { return t * a; }, h);
    (outside_too ? y + a * a : y).sum().backward();
    const Tensor b = v * 3, plain = k * b;
    (outside_too ? plain + b * b : plain).sum().backward();
    EXPECT_EQ(values(w.grad()), values(v.grad()));
    EXPECT_EQ(values(h.grad()), values(k.grad()));
  }
}

TEST(Engine, LongChainsDoNotRecurse) {
  const Tensor x = leaf({1}, 1);
  Tensor y = x;
  for (int i = 0; i < 200000; ++i) y = y * 1;
  y.sum().backward();
  EXPECT_EQ(x.grad().item(), 1);
}

TEST(Engine, ErrorsSayWhatToDo) {
  const Tensor x = leaf({2});
  EXPECT_SAYS((x * 1).backward(), "shape [2]");
  EXPECT_SAYS(full({1}, 1).backward(), "does not require a gradient");
  EXPECT_SAYS(backward({x.sum(), full({1}, 1)}), "output 1 of shape [1] does not require");
  Tensor y = x;
  EXPECT_SAYS(y.add_(1), "no_grad");
  EXPECT_SAYS(full({1}, 1, kInt64).set_requires_grad(), "int64");
}

// Statics go after a thread's own objects.
TEST(Engine, GraphsInStaticsEndWithTheProgram) {
  const pid_t child = fork();
  if (child == 0) {
    static Tensor* freed_at_exit = nullptr;
    struct Keeper {
      Tensor y;
    };
    static Keeper keeper;
    Tensor y = leaf({2});
    for (int i = 0; i < 1000; ++i) y = y * 1.0;
    keeper.y = y * 1.0;
    freed_at_exit = &keeper.y;
    std::exit(freed_at_exit->defined() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Engine, BackwardsOfSeveralThreadsMaySumIntoOneLeaf) {
  for (int round = 0; round < 50; ++round) {
    const Tensor w = leaf({2});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 20; ++i) (w * 1.0).sum().backward();
      });
    for (auto& t : threads) t.join();
    ASSERT_EQ(values(w.grad()), (std::vector<double>{80, 80}));
  }
}

TEST(Engine, DataThatIsSetBetweenForwardAndBackwardIsNamed) {
  const Tensor x = leaf({4}), w = leaf({4});
  const Tensor y = x * w;
  x.set_data(full({4}, 7, kFloat64));
  EXPECT_SAYS(y.sum().backward(), "[mul]");
  const Tensor z = w * w;
  w.set_data(zeros({0}, kFloat64));
  EXPECT_SAYS(z.sum().backward(), "[mul]");
}

TEST(Checkpoint, ARecomputationThatDoesSomethingElseIsNamed) {
  const Tensor x = leaf({2});
  int calls = 0;
  const Tensor y =
      checkpoint([&](const Tensor& a) { return calls++ ? (a * 3).detach() : a * 2; }, x);
  EXPECT_SAYS(y.sum().backward(), "[checkpoint] no output of the recomputation");
  calls = 0;
  const Tensor z = checkpoint(
      [&](const Tensor& a) {
        return calls++ ? a * 2 : (a * 2).view({2, 1});
      },
      x);
  EXPECT_SAYS(z.sum().backward(), "has shape [2], that of the first pass [2, 1]");
}

}  // namespace
}  // namespace sherd
