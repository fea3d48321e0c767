#include "tests/distributed/scenario.h"

#include <cmath>
#include <mutex>

#include "autograd/checkpoint.h"
#include "autograd/grad_mode.h"
#include "core/generator.h"

namespace sherd::scenario {
namespace {

// Draws that leave the context's generator as it was.
Tensor drawn(int rank, int step, const std::function<Tensor()>& f) {
  Generator own;
  own.seed(1000 + uint64_t(step), uint64_t(rank));
  GeneratorGuard guard(own);
  return f();
}

}  // namespace

std::vector<float> floats(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t, kFloat32));
  return {c.data<float>(), c.data<float>() + c.numel()};
}

GptBlock::GptBlock(int64_t dim)
    : norm1(add<nn::LayerNorm>("norm1", dim)),
      norm2(add<nn::LayerNorm>("norm2", dim)),
      attention(add<nn::MultiheadAttention>("attention", dim, 4)),
      ffn(add<Mlp>("ffn", dim)) {}
Tensor GptBlock::forward(const Tensor& x) {
  const Tensor n = norm1(x);
  const Tensor h = x + attention(n, n, n, {.is_causal = true}).output;
  return h + ffn(norm2(h));
}

Gpt::Gpt(const GptOptions& o)
    : tokens(add<nn::Embedding>("tokens", o.vocab, o.dim)),
      places(add<nn::Embedding>("places", o.positions, o.dim)),
      layers(add<nn::ModuleList<GptBlock>>("layers")),
      norm(add<nn::LayerNorm>("norm", o.dim)),
      output(add<nn::Linear>("output", o.dim, o.vocab, nn::LinearOptions{.bias = false})),
      checkpointed(o.checkpointed) {
  for (int64_t i = 0; i < o.layers; ++i) layers->append(o.dim);
  if (o.tied) output->weight.tie(tokens->weight);
}
Tensor Gpt::forward(const Tensor& ids) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < ids.size(-1); ++i) numbers.push_back(i);
  Tensor x = tokens(ids) + places(tensor(numbers));
  for (auto& l : *layers)
    x = checkpointed ? checkpoint([&](const Tensor& h) { return l(h); }, x) : l(x);
  return output(norm(x));
}

Tensor random_input(const Dims& sizes, int rank, int step) {
  return drawn(rank, step, [&] { return randn(sizes); });
}
Tensor random_ids(const Dims& sizes, int64_t vocab, int rank, int step) {
  return drawn(rank, step, [&] { return randint(0, vocab, sizes); });
}

Tensor gradient_of(const Tensor& p) {
  return p.grad().defined() ? p.grad() : zeros(p.sizes(), p.dtype());
}

dist::DeviceMesh hybrid_mesh(int shard_group_size) {
  return dist::init_device_mesh({dist::world_size() / shard_group_size, shard_group_size},
                                {"replicate", "shard"});
}

Trainee::Trainee(const Scenario& s, const Way& way, int rank, int world)
    : rank(rank), world(world), losses(world), one_process_(way.one_process) {
  manual_seed(7);
  instance_ = s.make();
  auto make_optimizers = [&] {
    const auto named = module().named_parameters();
    if (s.optimizers)
      optimizers = s.optimizers(named);
    else
      optimizers.push_back(std::make_unique<optim::Adam>(named, optim::AdamOptions{.lr = 1e-2}));
  };
  if (s.optimizer_before_wrapping) make_optimizers();
  if (way.fsdp) {
    FsdpOptions o = *way.fsdp;
    if (way.shard_group_size > 0) o.device_mesh = hybrid_mesh(way.shard_group_size);
    fsdp = std::make_unique<FsdpModule>(module(), o);
  }
  if (way.wrap) way.wrap(*this);
  if (way.ddp) ddp = std::make_shared<dist::DdpReducer>(module(), *way.ddp);
  if (way.one_process) module().materialize();
  if (!s.optimizer_before_wrapping) make_optimizers();
}

void Trainee::backward(int step) {
  for (int r = one_process_ ? 0 : rank; r < (one_process_ ? world : rank + 1); ++r) {
    Tensor loss = instance_.loss(r, step);
    losses[r].push_back(loss.item());
    if (one_process_) loss = loss * (1.0 / world);
    loss.backward();
  }
}

double Trainee::forward(int step) {
  double sum = 0;
  for (int r = one_process_ ? 0 : rank; r < (one_process_ ? world : rank + 1); ++r)
    sum += instance_.loss(r, step).item();
  return one_process_ ? sum / world : sum;
}

std::shared_ptr<void> Trainee::no_sync() {
  if (fsdp) return std::make_shared<FsdpModule::NoSync>(fsdp->runtime());
  if (!ddp) return nullptr;
  ddp->set_sync(false);
  return {ddp.get(), [](dist::DdpReducer* d) { d->set_sync(true); }};
}

std::vector<Tensor> Trainee::stepped() const {
  return fsdp ? fsdp->parameters() : instance_.module->parameters();
}

Trainee::Values Trainee::whole(const std::function<Tensor(const Tensor&)>& of) {
  Values values;
  // A gradient that is absent travels as NaN.
  auto local = [&](const Tensor& p) {
    const Tensor t = of(p);
    return t.defined() ? t.detach() : full(p.sizes(), NAN, p.dtype());
  };
  auto take = [&](const std::string& name, const Tensor& t) {
    std::vector<float> v = floats(t);
    const bool absent =
        !v.empty() && std::all_of(v.begin(), v.end(), [](float x) { return std::isnan(x); });
    if (!absent) values[name] = std::move(v);
  };
  if (fsdp)
    fsdp->for_each_full([&](const std::string&, const Tensor& p) { return local(p); }, take);
  else
    for (nn::Slot* slot : module().slots())  // tied ones under each name, as FSDP
      if (!slot->is_buffer && slot->tensor.defined()) take(slot->full_name(), local(slot->tensor));
  return values;
}
Trainee::Values Trainee::parameters() {
  return whole([](const Tensor& p) { return p; });
}
Trainee::Values Trainee::gradients() {
  return whole([](const Tensor& p) { return p.grad(); });
}

Result train(const Scenario& s, const Way& way, int world,
             const std::function<void(Trainee&)>& inspect) {
  Result result;
  result.losses.resize(world);
  result.stats.resize(world);
  result.collectives.resize(world);
  std::mutex mutex;
  run_ranks(way.one_process ? 1 : world, [&](int rank) {
    Trainee t(s, way, rank, world);
    const uint64_t before = dist::default_group()->sequence_number();
    for (int step = 0; step < s.steps; ++step) {
      if (s.step) {
        s.step(t, step);
        continue;
      }
      for (auto& o : t.optimizers) o->zero_grad(step % 2 == 0);
      t.backward(step);
      for (auto& o : t.optimizers) o->step();
    }
    const uint64_t after = dist::default_group()->sequence_number();
    auto parameters = t.parameters(), gradients = t.gradients();
    if (inspect) inspect(t);
    std::lock_guard lock(mutex);
    for (int r = 0; r < world; ++r)
      if (!t.losses[r].empty()) result.losses[r] = t.losses[r];
    if (t.fsdp) result.stats[rank] = t.fsdp->stats();
    result.collectives[rank] = after - before;
    if (rank == 0) result.parameters = parameters, result.gradients = gradients;
  });
  return result;
}

namespace {

void expect_same_bits(const Trainee::Values& a, const Trainee::Values& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (auto& [name, v] : b) {
    ASSERT_TRUE(a.contains(name)) << what << " " << name;
    EXPECT_EQ(a.at(name), v) << what << " " << name;
  }
}

}  // namespace

void expect_same_bits(const Result& a, const Result& b) {
  EXPECT_EQ(a.losses, b.losses);
  expect_same_bits(a.parameters, b.parameters, "parameter");
  expect_same_bits(a.gradients, b.gradients, "gradient of");
}

void expect_close(const Trainee::Values& a, const Trainee::Values& b, double rtol, double atol) {
  ASSERT_EQ(a.size(), b.size());
  for (auto& [name, v] : b) {
    ASSERT_TRUE(a.contains(name)) << name;
    const auto& u = a.at(name);
    ASSERT_EQ(u.size(), v.size()) << name;
    for (size_t i = 0; i < v.size(); ++i) {
      // A softmax does not change by a bias of the keys: its gradient is rounding alone, which Adam
      // makes steps of.
      const bool of_keys =
          name.ends_with("in_proj_bias") && i >= v.size() / 3 && i < 2 * v.size() / 3;
      ASSERT_NEAR(u[i], v[i], (of_keys ? 5e-3 : atol) + rtol * std::abs(v[i])) << name << " " << i;
    }
  }
}

void expect_close(const Result& a, const Result& b, double rtol, double atol) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (size_t r = 0; r < a.losses.size(); ++r) {
    ASSERT_EQ(a.losses[r].size(), b.losses[r].size()) << "rank " << r;
    for (size_t i = 0; i < a.losses[r].size(); ++i)
      EXPECT_NEAR(a.losses[r][i], b.losses[r][i], atol + rtol * std::abs(b.losses[r][i]))
          << "rank " << r << " loss " << i;
  }
  expect_close(a.parameters, b.parameters, rtol, atol);
  expect_close(a.gradients, b.gradients, rtol, atol);
}

void expect_error(const std::function<void()>& f, const std::vector<std::string>& texts) {
  try {
    f();
    ADD_FAILURE() << "no error; expected one with: " << testing::PrintToString(texts);
  } catch (const Error& e) {
    for (auto& text : texts)
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos)
          << text << "\nin: " << e.what();
  }
}

}  // namespace sherd::scenario
