// Module: the tree, its names and order, state_dict, modes, dtypes, hooks, moves.
#include "nn/module.h"

#include <atomic>
#include <thread>

#include "autograd/engine.h"
#include "core/generator.h"
#include "nn/nn.h"
#include "tests/nn/support.h"

namespace sherd {
namespace {

using namespace test;
using Names = std::vector<std::string>;

class Block : public nn::Module {
 public:
  explicit Block(int64_t dim)
      : norm(add<nn::LayerNorm>("norm", dim)),
        attention(add<nn::MultiheadAttention>("attention", dim, 2)),
        scale(parameter("scale", {dim}, nn::init::ones())),
        ffn(add<nn::Sequential>("ffn", nn::Linear(dim, 3), nn::GELU(), nn::Linear(3, dim))) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = norm(x);
    return x + ffn(attention(h, h, h).output) * scale;
  }
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::MultiheadAttention> attention;
  nn::Parameter scale;
  nn::Child<nn::Sequential> ffn;
};

class Model : public nn::Module {
 public:
  Model()
      : embedding(add<nn::Embedding>("embedding", 5, 4)),
        blocks(add<nn::ModuleList<Block>>("blocks")),
        head(add<nn::Linear>("head", 4, 5, nn::LinearOptions{.bias = false})),
        steps(buffer("steps", zeros({}))),
        scratch(buffer("scratch", zeros({2}), false)) {
    for (int i = 0; i < 2; ++i) blocks->append(4);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = embedding(ids);
    for (auto& b : *blocks) x = b(x);
    return head(x);
  }
  nn::Child<nn::Embedding> embedding;
  nn::Child<nn::ModuleList<Block>> blocks;
  nn::Child<nn::Linear> head;
  nn::Buffer steps, scratch;
};

Names block_names(const std::string& p) {  // own parameters first, then children, as in PyTorch
  Names r;
  for (auto* n : {"scale", "norm.weight", "norm.bias", "attention.in_proj_weight",
                  "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias",
                  "ffn.0.weight", "ffn.0.bias", "ffn.2.weight", "ffn.2.bias"})
    r.push_back(p + n);
  return r;
}
Names model_names() {
  Names r{"embedding.weight"};
  for (auto* p : {"blocks.0.", "blocks.1."})
    for (auto& n : block_names(p)) r.push_back(n);
  r.push_back("head.weight");
  return r;
}

TEST(Module, NamesAndOrderArePyTorchs) {
  Model m;
  EXPECT_EQ(names_of(m.named_parameters()), model_names());
  EXPECT_EQ(names_of(m.named_buffers()), (Names{"steps", "scratch"}));
  EXPECT_EQ(names_of(m.named_parameters("model")).front(), "model.embedding.weight");
  EXPECT_EQ(names_of(m.blocks->named_parameters("", false)), Names{});
  EXPECT_EQ(names_of((*m.blocks)[0]->named_parameters("", false)), Names{"scale"});
  Names modules;
  for (auto& [name, child] : m.named_modules()) modules.push_back(name);
  EXPECT_EQ(modules.front(), "");
  EXPECT_EQ(modules[1], "embedding");
  EXPECT_EQ(modules[3], "blocks.0");
  EXPECT_EQ(modules.back(), "head");
  EXPECT_EQ((*m.blocks)[1]->full_name(), "blocks.1");
  EXPECT_EQ((*m.blocks)[1]->attention->out_proj->full_name(), "blocks.1.attention.out_proj");
  EXPECT_EQ(m.head->type_name(), "sherd::nn::Linear");
  EXPECT_EQ(m.num_parameters(), 5 * 4 + 2 * (4 + 8 + 48 + 12 + 16 + 4 + 12 + 3 + 12 + 4) + 20);
  Names applied;
  m.apply([&](nn::Module& x) { applied.push_back(x.full_name()); });
  EXPECT_EQ(applied.front(), "embedding");
  EXPECT_EQ(applied.back(), "");  // children first
}

TEST(Module, NamesAreChecked) {
  struct Bad : nn::Module {
    explicit Bad(const std::string& a, const std::string& b) {
      parameter(a, {1}, nn::init::zeros());
      add<nn::ReLU>(b);
    }
  };
  expect_error([] { Bad("", "x"); }, {"\"\"", "Bad"});
  expect_error([] { Bad("a.b", "x"); }, {"a.b", "dot"});
  expect_error([] { Bad("x", "x"); }, {"x already"});
  Bad("a", "b");
}

TEST(Module, ParametersAreTheSameTensorsBeforeAndAfterTheyHaveValues) {
  manual_seed(1);
  nn::Linear m(3, 2);
  const std::vector<Tensor> before = m.parameters();
  EXPECT_TRUE(before[0].device().is_meta());
  EXPECT_TRUE(before[0].requires_grad() && before[0].is_leaf());
  m.materialize();
  EXPECT_TRUE(before[0].is_same(m.weight.get()));
  EXPECT_TRUE(before[0].device().is_cpu());
  (m.forward(ones({1, 3})) * 2).sum().backward();
  EXPECT_EQ(values(before[1].grad()), (std::vector<double>{2, 2}));
}

TEST(Module, ValuesFollowFromSeedAndNameAlone) {
  auto state = [](uint64_t seed, auto touch) {
    manual_seed(seed);
    Model m;
    touch(m);
    std::map<std::string, std::vector<double>> r;
    for (auto& [name, t] : m.state_dict()) r[name] = values(t);
    return r;
  };
  const auto first = state(3, [](Model&) {});
  EXPECT_EQ(first, state(3, [](Model& m) { m.materialize(); }));
  EXPECT_EQ(first, state(3, [](Model& m) { m.head->weight.get(); }));
  EXPECT_EQ(first, state(3, [](Model& m) { m.forward(tensor<int64_t>({1, 2}).view({1, 2})); }));
  EXPECT_EQ(first, state(3, [](Model& m) { m.head->materialize(3), m.materialize(); }))
      << "a part first";
  EXPECT_EQ(first, state(4, [](Model& m) { m.materialize(3); })) << "a seed given";
  // Draws of the generator in between change nothing.
  EXPECT_EQ(first, state(3, [](Model&) { rand({7}); }));
  const auto other = state(4, [](Model&) {});
  EXPECT_NE(first.at("head.weight"), other.at("head.weight"));
  // Each parameter has numbers of its own.
  EXPECT_NE(first.at("blocks.0.ffn.0.weight"), first.at("blocks.1.ffn.0.weight"));
}

TEST(Module, StateDictRoundTrip) {
  manual_seed(1);
  Model a;
  manual_seed(2);
  Model b;
  nn::StateDict state = a.state_dict();
  EXPECT_EQ(state.size(), model_names().size() + 1);
  EXPECT_TRUE(state.contains("steps"));
  EXPECT_FALSE(state.contains("scratch")) << "a buffer that is not persistent";
  EXPECT_EQ(a.state_dict("x").begin()->first, "x.steps");
  const Tensor kept = b.head->weight;
  b.load_state_dict(state);
  EXPECT_TRUE(kept.is_same(b.head->weight)) << "values are copied in";
  const Tensor ids = tensor<int64_t>({0, 4, 2}).view({1, 3});
  EXPECT_TRUE(same_bits(a.forward(ids), b.forward(ids)));
  // Another dtype is converted.
  nn::StateDict wide;
  for (auto& [name, t] : state) wide.set(name, to_raw(t, kFloat64));
  b.load_state_dict(wide);
  EXPECT_EQ(b.head->weight->dtype(), kFloat32);
  EXPECT_TRUE(same_bits(a.head->weight, b.head->weight));
}

TEST(Module, LoadingReportsAllWrongNamesAtOnce) {
  Model m;
  nn::StateDict state;
  for (auto& [name, t] : m.state_dict())
    if (name != "head.weight" && name != "blocks.0.scale") state.set(name, t);
  state.set("extra", zeros({1}));
  state.set("embedding.weight", zeros({4, 4}));
  state.set("blocks.1.norm.bias", zeros({5}));
  const Tensor before = contiguous_raw(m.blocks->begin()[0]->scale).clone();
  expect_error([&] { m.load_state_dict(state); },
               {"head.weight", "blocks.0.scale", "extra", "embedding.weight", "[4, 4]", "[5, 4]",
                "blocks.1.norm.bias", "missing", "unexpected"});
  EXPECT_TRUE(same_bits(before, m.blocks->begin()[0]->scale)) << "nothing is loaded by half";
  expect_error([&] { m.load_state_dict(state, false); }, {"embedding.weight"});
  state.set("embedding.weight", zeros({5, 4}));
  state.set("blocks.1.norm.bias", zeros({4}));
  const nn::LoadResult r = m.load_state_dict(state, false);
  EXPECT_EQ(r.missing, (Names{"blocks.0.scale", "head.weight"}));
  EXPECT_EQ(r.unexpected, Names{"extra"});
  EXPECT_EQ(values(m.embedding->weight), std::vector<double>(20, 0));
}

TEST(Module, TiedParametersAreOne) {
  struct Tied : nn::Module {
    Tied() : in(add<nn::Embedding>("in", 5, 3)), out(add<nn::Linear>("out", 3, 5)) {
      out->weight.tie(in->weight);
    }
    Tensor forward(const Tensor& ids) { return out(in(ids)); }
    nn::Child<nn::Embedding> in;
    nn::Child<nn::Linear> out;
  };
  manual_seed(1);
  Tied m;
  EXPECT_EQ(names_of(m.named_parameters()), (Names{"in.weight", "out.bias"}));
  EXPECT_EQ(m.num_parameters(), 20);
  EXPECT_EQ(m.state_dict().size(), 3u);  // under each name, as in PyTorch
  EXPECT_TRUE(m.in->weight->is_same(m.out->weight.get()));
  nn::call(m, tensor<int64_t>({1})).sum().backward();
  EXPECT_TRUE(m.in->weight->grad().defined());
  EXPECT_TRUE(same_bits(m.in->weight->grad(), m.out->weight->grad()));
  // The values are those of the first name, whichever is touched.
  manual_seed(1);
  Tied n;
  n.out->weight.get();
  EXPECT_TRUE(same_bits(m.in->weight, n.out->weight));
  nn::StateDict state;
  for (auto& [name, t] : m.state_dict()) state.set(name, full(t.sizes(), 2));
  n.load_state_dict(state);
  EXPECT_TRUE(n.in->weight->is_same(n.out->weight.get()));
  n.to(kFloat64);
  EXPECT_TRUE(n.in->weight->is_same(n.out->weight.get()));
  EXPECT_EQ(n.in->weight->dtype(), kFloat64);
  expect_error(
      [] {
        nn::Linear a(2, 3), b(3, 2);
        a.weight.tie(b.weight);
      },
      {"[2, 3]", "[3, 2]"});
}

TEST(Module, DTypes) {
  manual_seed(1);
  Model early, late;
  early.to(kBFloat16), early.materialize();
  late.materialize(), late.to(kBFloat16);
  for (auto& [name, p] : early.named_parameters()) EXPECT_EQ(p.dtype(), kBFloat16) << name;
  EXPECT_EQ(early.steps->dtype(), kBFloat16) << "buffers too";
  // Rounded from the same float32 numbers, whenever the dtype was set.
  for (auto& [name, t] : early.state_dict())
    EXPECT_TRUE(same_bits(t, late.state_dict().at(name))) << name;
  const Tensor y = late.forward(tensor<int64_t>({1, 2}).view({1, 2}));
  EXPECT_EQ(y.dtype(), kBFloat16);
  y.sum().backward();
  EXPECT_EQ(late.head->weight->grad().dtype(), kBFloat16);
  EXPECT_TRUE(late.head->weight->requires_grad());
  late.to(kFloat32);
  EXPECT_EQ(late.head->weight->grad().dtype(), kFloat32) << "converted as the parameter is";
  expect_error([&] { late.to(kInt64); }, {"int64"});
}

TEST(Module, FirstForwardsOfSeveralThreads) {
  for (int round = 0; round < 30; ++round) {
    nn::Sequential m(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 1));
    std::vector<std::thread> threads;
    std::atomic<int> failed = 0;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        try {
          NoGrad off;
          nn::call(m, full({2, 8}, 1));
        } catch (const Error&) {
          ++failed;
        }
      });
    for (auto& t : threads) t.join();
    ASSERT_EQ(failed, 0);
  }
}

TEST(Module, WhatWasNeverAddedIsNamed) {
  nn::Child<nn::Linear> child;
  expect_error([&] { child(full({1, 2}, 1)); }, {"child", "add<"});
  nn::ModuleList<nn::Linear> list;
  expect_error([&] { list[0]; }, {"[ModuleList]", "0"});
  nn::Sequential s(nn::Linear(2, 2));
  expect_error([&] { s[1]; }, {"[Sequential]", "1"});
  static_assert(!std::is_copy_assignable_v<nn::Parameter>, "tie() is meant");
}

TEST(Module, ModesAndGradients) {
  Model m;
  EXPECT_TRUE(m.is_training());
  m.eval();
  for (auto& [name, child] : m.named_modules()) EXPECT_FALSE(child->is_training()) << name;
  m.train();
  EXPECT_TRUE((*m.blocks)[1]->ffn->is_training());
  m.requires_grad_(false);
  m.head->requires_grad_();
  m.forward(tensor<int64_t>({1}).view({1, 1})).sum().backward();
  for (auto& [name, p] : m.named_parameters())
    EXPECT_EQ(p.grad().defined(), name == "head.weight") << name;
  m.zero_grad();
  EXPECT_FALSE(m.head->weight->grad().defined());
}

TEST(Module, HooksRunAroundForwardThroughTheChild) {
  Names trace;
  nn::Sequential s(nn::Linear(2, 2), nn::ReLU());
  s.register_forward_pre_hook([&](nn::Module& m) { trace.push_back("pre " + m.type_name()); });
  s.register_forward_hook([&](nn::Module&) { trace.push_back("post"); });
  s[1].register_forward_pre_hook([&](nn::Module& m) { trace.push_back("pre " + m.full_name()); });
  nn::call(s, ones({1, 2}));
  EXPECT_EQ(trace, (Names{"pre sherd::nn::Sequential", "pre 1", "post"}));
}

struct Recorder : nn::CallHooks {
  Names* trace;
  std::string name;
  bool fails = false;
  Recorder(Names* t, std::string n) : trace(t), name(std::move(n)) {}
  void pre(nn::Module&, const nn::TensorVisitor& in) override {
    int n = 0;
    in([&](Tensor& t) {
      ++n;
      t = t * 2;
    });
    trace->push_back("pre " + name + " " + std::to_string(n));
    if (fails) fail("[pre] no");
  }
  void post(nn::Module&, const nn::TensorVisitor& out) override {
    int n = 0;
    out([&](Tensor& t) {
      ++n;
      t = t + 1;
    });
    trace->push_back("post " + name + " " + std::to_string(n));
  }
  void unwind(nn::Module&) noexcept override { trace->push_back("unwind " + name); }
};

struct Pair {
  Tensor a;
  std::vector<Tensor> b;
};
struct Summing : nn::Module {
  Pair forward(const Pair& p, int factor) {
    if (factor == 0) fail("[forward] zero");
    return {p.a * factor, {p.b[0], p.b[1]}};
  }
};

class Misfit : public nn::Module {
 public:
  Misfit() : block(add<Inner>("block")) {}
  Tensor forward(const Tensor& x) { return block(x); }
  struct Inner : nn::Module {
    Inner() : ffn(add<nn::Sequential>("ffn", nn::Linear(4, 3), nn::Linear(5, 2))) {}
    Tensor forward(const Tensor& x) { return ffn(x); }
    nn::Child<nn::Sequential> ffn;
  };
  nn::Child<Inner> block;
};

TEST(Module, AnErrorSaysInWhichModuleItHappened) {
  Misfit m;
  const std::string e = error_of([&] { nn::call(m, ones({2, 4})); });
  EXPECT_TRUE(e.starts_with("[linear] ")) << e;
  EXPECT_TRUE(e.ends_with(" (in module 'block.ffn.1', sherd::nn::Linear)")) << e;
  // What is in no module has its type; a hook's error is as it was.
  nn::Linear alone(3, 2);
  EXPECT_TRUE(error_of([&] {
                nn::call(alone, ones({2, 4}));
              }).ends_with(" (in sherd::nn::Linear)"));
  m.block->ffn->register_forward_pre_hook([](nn::Module&) { fail("[hook] no"); });
  EXPECT_EQ(error_of([&] { nn::call(m, ones({2, 4})); }), "[hook] no");
}

// They would be lost: values come from the seed, at first use.
TEST(Module, ParametersWithoutValuesAreNotWritten) {
  nn::Linear linear(2, 2);
  {
    NoGrad off;
    for (Tensor p : linear.parameters())
      for (const auto& write : std::vector<std::function<void()>>{
               [&] { p.fill_(0.5); }, [&] { p.mul_(2); }, [&] { p.copy_(ones({})); }})
        EXPECT_NE(error_of(write).find("materialize()"), std::string::npos) << error_of(write);
    linear.materialize();
    for (Tensor p : linear.parameters()) p.fill_(0.5);
  }
  EXPECT_EQ(linear.weight->sum().item(), 2);
  const Tensor meta = empty({1}, kFloat32, kMeta);
  EXPECT_NE(error_of([&] { meta.item(); }).find("meta"), std::string::npos);
  EXPECT_NE(error_of([&] { ones({1}).copy_(meta); }).find("meta"), std::string::npos);
}

TEST(Module, AParameterThatIsNotThereIsAnError) {
  nn::Linear linear(2, 2, {.bias = false});
  EXPECT_NE(error_of([&] { linear.bias->numel(); }).find("[parameter]"), std::string::npos);
}

TEST(Module, ParametersArePrinted) {
  nn::Linear linear(2, 1, {.bias = false});
  linear.weight->set_data(tensor<float>({1, 2}).view({1, 2}));
  std::ostringstream out;
  out << linear.weight;
  EXPECT_EQ(out.str(), "tensor([[1., 2.]], requires_grad=True)");
}

TEST(Module, CallHooksSeeAndReplaceTensors) {
  Names trace;
  Summing m;
  auto first = std::make_shared<Recorder>(&trace, "first");
  auto second = std::make_shared<Recorder>(&trace, "second");
  m.state().hooks = {first, second};
  const Pair in{ones({1}), {ones({1}), ones({1})}};
  const Pair out = nn::call(m, in, 10);
  EXPECT_EQ(trace, (Names{"pre first 3", "pre second 3", "post second 3", "post first 3"}));
  EXPECT_EQ(out.a.item(), 42);  // 1 * 2 * 2 * 10 + 1 + 1
  EXPECT_EQ(out.b[1].item(), 6);
  EXPECT_EQ(in.a.item(), 1) << "the caller's value is its own";
  trace.clear();
  EXPECT_THROW(nn::call(m, in, 0), Error);
  EXPECT_EQ(trace, (Names{"pre first 3", "pre second 3", "unwind second", "unwind first"}));
  trace.clear();
  second->fails = true;
  EXPECT_THROW(nn::call(m, in, 1), Error);
  EXPECT_EQ(trace.back(), "unwind first");
  EXPECT_EQ(std::count(trace.begin(), trace.end(), "unwind first"), 1);
}

TEST(Module, AsForwardRunsAnotherMethodWithHooks) {
  struct Twice : nn::Module {
    Tensor forward(const Tensor& x) { return x; }
    Tensor features(const Tensor& x) {
      return nn::as_forward(
          this, [](const Tensor& y) { return y * 3; }, x);
    }
    void nothing() {
      nn::as_forward(this, [] {});
    }
  };
  Names trace;
  Twice m;
  EXPECT_EQ(m.features(ones({})).item(), 3);
  m.state().hooks = {std::make_shared<Recorder>(&trace, "h")};
  EXPECT_EQ(m.features(ones({})).item(), 7);
  m.nothing();
  EXPECT_EQ(trace, (Names{"pre h 1", "post h 1", "pre h 0", "post h 0"}));
}

TEST(Module, MovesKeepTheTree) {
  manual_seed(1);
  auto make = [] {
    Model m;
    m.head->register_forward_hook([](nn::Module&) {});
    return m;
  };
  Model a = make();
  Model b = std::move(a);
  EXPECT_EQ(names_of(b.named_parameters()), model_names());
  EXPECT_EQ((*b.blocks)[1]->ffn->full_name(), "blocks.1.ffn");
  EXPECT_EQ(b.head->weight.slot().full_name(), "head.weight");
  const Tensor y = b.forward(tensor<int64_t>({1, 2}).view({1, 2}));
  nn::Sequential outer(nn::Linear(2, 3), nn::Sequential(nn::Linear(3, 4), nn::ReLU()));
  nn::Sequential moved = std::move(outer);
  EXPECT_EQ(names_of(moved.named_parameters()),
            (Names{"0.weight", "0.bias", "1.0.weight", "1.0.bias"}));
  EXPECT_EQ(nn::call(moved, ones({1, 2})).sizes(), (Dims{1, 4}));
}

TEST(Module, SequentialAndModuleList) {
  manual_seed(1);
  nn::Sequential s(nn::Linear(2, 3), nn::ReLU());
  s.append(nn::Linear(3, 1));
  EXPECT_EQ(s.size(), 3);
  EXPECT_EQ(s[2].type_name(), "sherd::nn::Linear");
  EXPECT_THROW(s[3], std::exception);
  const Tensor x = random_tensor({4, 2}, 1);
  auto& first = static_cast<nn::Linear&>(s[0]);
  auto& last = static_cast<nn::Linear&>(s[2]);
  EXPECT_TRUE(same_bits(nn::call(s, x), last.forward(F::relu(first.forward(x)))));
  EXPECT_TRUE(same_bits(nn::call(*std::make_unique<nn::Sequential>(), x), x)) << "empty";

  nn::ModuleList<nn::Linear> list;
  for (int i = 0; i < 11; ++i) list.append(2, 2);
  EXPECT_EQ(list.size(), 11);
  EXPECT_TRUE(list.is_container());
  EXPECT_EQ(names_of(list.named_parameters()).back(), "10.bias") << "in order, not by text";
  EXPECT_THROW(list[11], std::exception);
}

// ---- visit_tensors
struct Options {
  int n = 3;
  std::string text = "no";
  std::optional<Tensor> maybe;
};
struct Everything {
  Tensor a;
  std::optional<Tensor> none, some;
  std::vector<Pair> list;
  std::map<std::string, Tensor> named;
  std::tuple<int, Tensor> both;
  Options options;
};

struct Arrays {
  int64_t sizes[3] = {};
  Tensor pair[2];
  Tensor single;
  Options table[2];
  bool last = false;
};
struct Many {
  Tensor t[20];
};

TEST(VisitTensors, FindsThemInArrays) {
  Arrays a{{1, 2, 3}, {ones({1}), ones({1})}, ones({1}), {{}, {1, "x", ones({1})}}};
  int n = 0;
  nn::visit_tensors(a, [&](Tensor& t) { t = t * double(++n + 1); });
  EXPECT_EQ(n, 4);
  EXPECT_EQ(a.pair[1].item(), 3);
  EXPECT_EQ(a.single.item(), 4);
  EXPECT_EQ(a.table[1].maybe->item(), 5);
  Many many;
  many.t[19] = ones({1});
  n = 0;
  nn::visit_tensors(many, [&](Tensor&) { ++n; });
  EXPECT_EQ(n, 1);
  static_assert(nn::visit_detail::fields_of<Arrays> == 5 && nn::visit_detail::fields_of<Many> == 1);
}

TEST(VisitTensors, FindsThemInNestedValues) {
  auto one = [] { return ones({1}); };
  Everything e{one(),          {},         one(),          {{one(), {one(), one()}}},
               {{"x", one()}}, {7, one()}, {1, "x", one()}};
  int n = 0;
  nn::visit_tensors(e, [&](Tensor& t) { t = t * double(++n + 1); });
  EXPECT_EQ(n, 8);
  EXPECT_EQ(e.list[0].b[1].item(), 6);
  EXPECT_EQ(e.named.at("x").item(), 7);
  EXPECT_EQ(e.options.maybe->item(), 9);
  Everything empty;
  nn::visit_tensors(empty, [](Tensor&) { FAIL() << "undefined tensors are passed over"; });
  std::array<Tensor, 2> two{one(), Tensor()};
  n = 0;
  nn::visit_tensors(two, [&](Tensor&) { ++n; });
  EXPECT_EQ(n, 1);
  std::string text = "text";
  double number = 1;
  nn::visit_tensors(text, [](Tensor&) { FAIL(); });
  nn::visit_tensors(number, [](Tensor&) { FAIL(); });
}

}  // namespace
}  // namespace sherd
