// Whole training runs against PyTorch's (tests/goldens): loss and gradient norm of every step, and
// the final weights. In float64 they agree to rounding; in float32 as closely as PyTorch's own two
// runs.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "autograd/engine.h"
#include "core/safetensors.h"
#include "nn/nn.h"

namespace sherd {
namespace {

using Json = nlohmann::json;

class Block : public nn::Module {
 public:
  Block(int64_t dim, int64_t ff_dim, int64_t heads, bool causal)
      : layer_norm_(add<nn::LayerNorm>("layer_norm", dim)),
        attention_(add<nn::MultiheadAttention>("attention", dim, heads)),
        ffn_(add<nn::Sequential>("ffn", nn::Linear(dim, ff_dim), nn::ReLU(),
                                 nn::Linear(ff_dim, dim))),
        causal_(causal) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = layer_norm_(x + attention_(x, x, x, {.is_causal = causal_}).output);
    return h + ffn_(h);
  }

 private:
  nn::Child<nn::LayerNorm> layer_norm_;
  nn::Child<nn::MultiheadAttention> attention_;
  nn::Child<nn::Sequential> ffn_;
  bool causal_;
};

class BigModel : public nn::Module {
 public:
  explicit BigModel(const Json& c)
      : embedding_(add<nn::Embedding>("embedding", c["vocab"], c["dim"])),
        layers_(add<nn::ModuleList<Block>>("layers")),
        output_head_(add<nn::Linear>("output_head", c["dim"], c["vocab"])) {
    for (int i = 0; i < c["layers"].get<int>(); ++i)
      layers_->append(c["dim"], c["ff_dim"], c["heads"], c["causal"]);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = embedding_(ids);
    for (auto& layer : *layers_) x = layer(x);
    return output_head_(x);
  }

 private:
  nn::Child<nn::Embedding> embedding_;
  nn::Child<nn::ModuleList<Block>> layers_;
  nn::Child<nn::Linear> output_head_;
};

// Pre-LN decoder as nanoGPT users write it: the attention from F, not from a module.
class GptBlock : public nn::Module {
 public:
  GptBlock(int64_t dim, int64_t heads)
      : ln1_(add<nn::LayerNorm>("ln1", dim)),
        ln2_(add<nn::LayerNorm>("ln2", dim)),
        qkv_(add<nn::Linear>("qkv", dim, 3 * dim)),
        proj_(add<nn::Linear>("proj", dim, dim)),
        fc1_(add<nn::Linear>("fc1", dim, 4 * dim)),
        fc2_(add<nn::Linear>("fc2", 4 * dim, dim)),
        heads_(heads) {}
  Tensor forward(const Tensor& input) {
    Tensor x = input;
    const int64_t b = x.size(0), t = x.size(1), c = x.size(2);
    const Tensor qkv = qkv_(ln1_(x)).view({b, t, 3, heads_, c / heads_}).permute({2, 0, 3, 1, 4});
    const Tensor y = F::scaled_dot_product_attention(qkv.select(0, 0), qkv.select(0, 1),
                                                     qkv.select(0, 2), {.is_causal = true});
    x = x + proj_(y.transpose(1, 2).reshape({b, t, c}));
    return x + fc2_(F::gelu(fc1_(ln2_(x)), "tanh"));
  }

 private:
  nn::Child<nn::LayerNorm> ln1_, ln2_;
  nn::Child<nn::Linear> qkv_, proj_, fc1_, fc2_;
  int64_t heads_;
};

class Gpt : public nn::Module {
 public:
  explicit Gpt(const Json& c)
      : wte_(add<nn::Embedding>("wte", c["vocab"], c["dim"])),
        wpe_(add<nn::Embedding>("wpe", c["seq"], c["dim"])),
        layers_(add<nn::ModuleList<GptBlock>>("layers")),
        ln_f_(add<nn::LayerNorm>("ln_f", c["dim"])),
        head_(add<nn::Linear>("head", c["dim"], c["vocab"], nn::LinearOptions{.bias = false})) {
    for (int i = 0; i < c["layers"].get<int>(); ++i) layers_->append(c["dim"], c["heads"]);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = wte_(ids) + wpe_->weight->narrow(0, 0, ids.size(1));
    for (auto& layer : *layers_) x = layer(x);
    return head_(ln_f_(x));
  }

 private:
  nn::Child<nn::Embedding> wte_, wpe_;
  nn::Child<nn::ModuleList<GptBlock>> layers_;
  nn::Child<nn::LayerNorm> ln_f_;
  nn::Child<nn::Linear> head_;
};

std::vector<int64_t> read_tokens(const std::string& path) {
  std::ifstream f(path, std::ios::binary);
  std::vector<int64_t> ids;
  for (unsigned char two[2]; f.read(reinterpret_cast<char*>(two), 2);)
    ids.push_back(two[0] + 256 * two[1]);
  return ids;
}

// AdamW as its paper (arXiv 1711.05101) writes it, in float64.
class AdamW {
 public:
  AdamW(double lr, double decay) : lr_(lr), decay_(decay) {}
  void step(const nn::Module::NamedTensors& parameters, double gradient_scale) {
    ++t_;
    for (auto& [name, p] : parameters) {
      const Tensor g = contiguous_raw(to_raw(p.grad(), kFloat64));
      const Tensor x = to_raw(p.detach(), kFloat64);
      auto& [m, v] = moments_[name];
      m.resize(size_t(p.numel())), v.resize(size_t(p.numel()));
      for (size_t i = 0; i < m.size(); ++i) {
        const double gi = g.data<double>()[i] * gradient_scale;
        double& xi = x.data<double>()[i];
        m[i] = 0.9 * m[i] + 0.1 * gi, v[i] = 0.999 * v[i] + 0.001 * gi * gi;
        const double root = std::sqrt(v[i] / (1 - std::pow(0.999, t_))) + 1e-8;
        xi -= lr_ * decay_ * xi + lr_ * (m[i] / (1 - std::pow(0.9, t_))) / root;
      }
      if (!p.is_same(x)) copy_raw(p, x);
    }
  }

 private:
  double lr_, decay_;
  int t_ = 0;
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> moments_;
};

struct Limits {
  double loss, norm;  // relative
  double weights,
      key_bias_weights;  // absolute; the key part of in_proj_bias follows rounding noise
};

template <class Model>
void run(const std::string& name, DType dtype, const Limits& limits) {
  const std::string folder = "tests/goldens/" + name + "/";
  const Json trace = Json::parse(std::ifstream(folder + "trace.json"));
  const Json& c = trace["config"];
  const int64_t b = c["batch"], t = c["seq"];
  const int accumulate = c["accumulate"];
  const std::vector<int64_t> tokens = read_tokens(folder + "tokens.bin");

  Model model(c);
  model.to(dtype);
  nn::StateDict init;
  for (auto& [key, value] : load_safetensors(folder + "init.safetensors")) init.set(key, value);
  model.load_state_dict(init);
  AdamW optimizer(c["lr"], c["weight_decay"]);
  int64_t sample = 0;
  for (const Json& step : trace["steps"]) {
    model.zero_grad();
    double loss = 0;
    for (int k = 0; k < accumulate; ++k) {
      std::vector<int64_t> x, y;
      for (int64_t i = 0; i < b; ++i, ++sample)
        for (int64_t j = 0; j < t; ++j)
          x.push_back(tokens.at(size_t(sample * t + j))),
              y.push_back(tokens.at(size_t(sample * t + j + 1)));
      const Tensor logits = nn::call(model, tensor<int64_t>(x).view({b, t}));
      const Tensor part =
          F::cross_entropy(logits.view({-1, c["vocab"]}), tensor<int64_t>(y)) / double(accumulate);
      part.backward();
      loss += part.item();
    }
    double squares = 0;
    const auto parameters = model.named_parameters();
    for (auto& [key, p] : parameters) {
      ASSERT_TRUE(p.grad().defined()) << key;
      const Tensor g = contiguous_raw(to_raw(p.grad(), kFloat64));
      for (int64_t i = 0; i < g.numel(); ++i) squares += g.data<double>()[i] * g.data<double>()[i];
    }
    const double norm = std::sqrt(squares), max_norm = c["max_norm"];
    const double want = step["loss"], want_norm = step["grad_norm"];
    ASSERT_NEAR(loss, want, limits.loss * want) << name << ", step " << step["step"];
    ASSERT_NEAR(norm, want_norm, limits.norm * want_norm) << name << ", step " << step["step"];
    optimizer.step(parameters, std::min(1.0, max_norm / (norm + 1e-6)));
  }
  for (auto& [key, want] : load_safetensors(folder + "final.safetensors")) {
    const Tensor got = contiguous_raw(to_raw(model.state_dict().at(key), kFloat64));
    const Tensor w = to_raw(want, kFloat64);
    const bool packed_bias = key.ends_with("in_proj_bias") || key.ends_with("qkv.bias");
    for (int64_t i = 0, n = got.numel(); i < n; ++i) {
      const bool key_bias = packed_bias && i >= n / 3 && i < 2 * n / 3;
      ASSERT_NEAR(got.data<double>()[i], w.data<double>()[i],
                  key_bias ? limits.key_bias_weights : limits.weights)
          << key << ", element " << i;
    }
  }
}

// final.safetensors is rounded to float32: 1e-7 of weights below 4.
constexpr Limits kExact{1e-10, 1e-9, 1e-6, 5e-3};
constexpr Limits kSingle{2e-5, 2e-4, 2e-4, 5e-3};

TEST(Goldens, BigModelTiny) { run<BigModel>("bigmodel_tiny", kFloat64, kExact); }
TEST(Goldens, BigModelTinyFloat32) { run<BigModel>("bigmodel_tiny", kFloat32, kSingle); }
TEST(Goldens, BigModelOdd) { run<BigModel>("bigmodel_odd", kFloat64, kExact); }
TEST(Goldens, BigModelOddFloat32) { run<BigModel>("bigmodel_odd", kFloat32, kSingle); }
TEST(Goldens, BigModelNoMask) { run<BigModel>("bigmodel_no_mask", kFloat64, kExact); }
TEST(Goldens, BigModelNoMaskFloat32) { run<BigModel>("bigmodel_no_mask", kFloat32, kSingle); }
TEST(Goldens, BigModelWideBatch) { run<BigModel>("bigmodel_wide_batch", kFloat64, kExact); }
TEST(Goldens, BigModelWideBatchFloat32) { run<BigModel>("bigmodel_wide_batch", kFloat32, kSingle); }
TEST(Goldens, GptTiny) { run<Gpt>("gpt_tiny", kFloat64, kExact); }
TEST(Goldens, GptTinyFloat32) { run<Gpt>("gpt_tiny", kFloat32, kSingle); }

}  // namespace
}  // namespace sherd
