// Runs recorded calls of modules.
#include <fstream>

#include "core/safetensors.h"
#include "nn/nn.h"
#include "tests/conformance/report.h"

namespace sherd::test {
namespace {

// A module's constructor or forward arguments, by position or by name.
class Arguments {
 public:
  Arguments(Decoder& d, const Json& args, const Json& kwargs, const std::string& args_path,
            const std::string& kwargs_path)
      : d_(d), args_(args), kwargs_(kwargs), args_path_(args_path), kwargs_path_(kwargs_path) {}
  template <class T>
  T get(size_t position, const std::string& name) {
    used_ = std::max(used_, position + 1), names_.push_back(name);
    if (position < args_.size())
      return d_.as<T>(args_[position], args_path_ + std::to_string(position));
    if (!kwargs_.contains(name)) throw Unsupported("no " + name);
    return d_.as<T>(kwargs_[name], kwargs_path_ + name);
  }
  template <class T>
  T get(size_t position, const std::string& name, T otherwise) {
    if (position < args_.size() || kwargs_.contains(name)) return get<T>(position, name);
    used_ = std::max(used_, position + 1), names_.push_back(name);
    return otherwise;
  }
  // An option that must have this value, or not be given.
  void only(size_t position, const std::string& name, bool value) {
    if (get<bool>(position, name, value) != value) throw Unsupported("option " + name);
  }
  void done() const {
    if (args_.size() > used_) throw Unsupported("too many arguments");
    for (auto& [k, v] : kwargs_.items())
      if (std::find(names_.begin(), names_.end(), k) == names_.end() && !v.is_null() &&
          k != "device" && k != "dtype")
        throw Unsupported("option " + k);
  }

 private:
  Decoder& d_;
  const Json &args_, &kwargs_;
  std::string args_path_, kwargs_path_;
  size_t used_ = 0;
  std::vector<std::string> names_;
};

constexpr size_t kByName = 1000;  // the position of what PyTorch takes by name only

struct Case {
  const Json& test;
  Decoder& decoder;
  DType dtype;
  Arguments constructor, call;

  // Gives the module the recorded state, and the decoder its parameters.
  template <class M>
  void load(M& module) {
    constructor.done();
    module.to(dtype);
    nn::StateDict state;
    for (auto& [name, v] : test["state"].items()) state.set(name, decoder.tensor(v));
    module.load_state_dict(state);
    module.train(test["training"].get<bool>());
    for (auto& [name, p] : module.named_parameters()) decoder.leaves["state." + name] = p;
  }
};

using Runner = Outputs (*)(Case&);

// A module of one tensor.
template <class M>
Outputs unary(Case& c, M& module) {
  c.load(module);
  const Tensor x = c.call.get<Tensor>(0, "input");
  c.call.done();
  return {nn::call(module, x)};
}
// A function of one tensor, for modules that Sherd has only in this form.
Outputs function(Case& c, const std::function<Tensor(const Tensor&)>& f) {
  c.constructor.done();
  const Tensor x = c.call.get<Tensor>(0, "input");
  c.call.done();
  return {f(x)};
}
Dims shape_of(Case& c) { return c.constructor.get<Dims>(0, "normalized_shape"); }

Outputs multihead_attention(Case& c) {
  const auto dim = c.constructor.get<int64_t>(0, "embed_dim");
  const auto heads = c.constructor.get<int64_t>(1, "num_heads");
  const auto dropout = c.constructor.get<double>(2, "dropout", 0.0);
  const auto bias = c.constructor.get<bool>(3, "bias", true);
  c.constructor.only(4, "add_bias_kv", false), c.constructor.only(5, "add_zero_attn", false);
  const bool batch_first = c.constructor.get<bool>(kByName, "batch_first", false);
  const auto q = c.call.get<Tensor>(0, "query"), k = c.call.get<Tensor>(1, "key"),
             v = c.call.get<Tensor>(2, "value");
  nn::MultiheadAttention module(dim, heads, {.bias = bias, .dropout = dropout});
  c.load(module);
  nn::MultiheadAttentionArguments a;
  a.key_padding_mask = c.call.get<Tensor>(3, "key_padding_mask", {});
  a.need_weights = c.call.get<bool>(4, "need_weights", true);
  a.attn_mask = c.call.get<Tensor>(5, "attn_mask", {});
  a.average_attn_weights = c.call.get<bool>(6, "average_attn_weights", true);
  a.is_causal = c.call.get<bool>(7, "is_causal", false);
  c.call.done();
  if (q.dim() == 3 && !batch_first) throw Unsupported("batch_first = false");
  const auto r = nn::call(module, q, k, v, a);
  // The fused way gives the same output.
  if (a.need_weights && r.output.numel()) {
    a.need_weights = false;
    const Tensor fused = nn::call(module, q, k, v, a).output;
    if (c.dtype == kFloat64 && !(amax(abs(fused - r.output)).item() < 1e-9))
      fail("the output differs without need_weights");
  }
  return r.weights.defined() ? Outputs{r.output, r.weights} : Outputs{r.output};
}

const std::map<std::string, Runner>& runners() {
  static const std::map<std::string, Runner> all{
      {"Linear",
       [](Case& c) {
         const auto in = c.constructor.get<int64_t>(0, "in_features");
         const auto out = c.constructor.get<int64_t>(1, "out_features");
         nn::Linear m(in, out, {.bias = c.constructor.get<bool>(2, "bias", true)});
         return unary(c, m);
       }},
      {"Embedding",
       [](Case& c) {
         const auto n = c.constructor.get<int64_t>(0, "num_embeddings");
         const auto dim = c.constructor.get<int64_t>(1, "embedding_dim");
         nn::Embedding m(
             n, dim,
             {.padding_idx = c.constructor.get<std::optional<int64_t>>(2, "padding_idx", {})});
         return unary(c, m);
       }},
      {"LayerNorm",
       [](Case& c) {
         const Dims shape = shape_of(c);
         nn::LayerNormOptions o;
         o.eps = c.constructor.get<double>(1, "eps", 1e-5);
         o.elementwise_affine = c.constructor.get<bool>(2, "elementwise_affine", true);
         o.bias = c.constructor.get<bool>(3, "bias", true);
         nn::LayerNorm m(shape, o);
         return unary(c, m);
       }},
      {"MultiheadAttention", multihead_attention},
      {"ReLU",
       [](Case& c) {
         nn::ReLU m;
         return unary(c, m);
       }},
      {"GELU",
       [](Case& c) {
         nn::GELU m(c.constructor.get<std::string>(0, "approximate", "none"));
         return unary(c, m);
       }},
      {"SiLU", [](Case& c) { return function(c, F::silu); }},
      {"Sigmoid", [](Case& c) { return function(c, [](auto& x) { return sigmoid(x); }); }},
      {"Tanh", [](Case& c) { return function(c, [](auto& x) { return tanh(x); }); }},
      {"LeakyReLU",
       [](Case& c) {
         const double slope = c.constructor.get<double>(0, "negative_slope", 0.01);
         return function(c, [=](auto& x) { return F::leaky_relu(x, slope); });
       }},
      {"Softmax",
       [](Case& c) {
         const auto dim = c.constructor.get<int64_t>(0, "dim");
         return function(c, [=](auto& x) { return F::softmax(x, dim); });
       }},
      {"LogSoftmax",
       [](Case& c) {
         const auto dim = c.constructor.get<int64_t>(0, "dim");
         return function(c, [=](auto& x) { return F::log_softmax(x, dim); });
       }},
      {"CrossEntropyLoss",
       [](Case& c) {
         CrossEntropyArguments a;
         a.weight = c.constructor.get<Tensor>(kByName, "weight", {});
         a.ignore_index = c.constructor.get<int64_t>(kByName, "ignore_index", -100);
         a.reduction = c.constructor.get<Reduction>(kByName, "reduction", Reduction::kMean);
         a.label_smoothing = c.constructor.get<double>(kByName, "label_smoothing", 0.0);
         c.constructor.done();
         const auto x = c.call.get<Tensor>(0, "input"), t = c.call.get<Tensor>(1, "target");
         return Outputs{F::cross_entropy(x, t, a)};
       }},
      {"MSELoss",
       [](Case& c) {
         const auto r = c.constructor.get<Reduction>(kByName, "reduction", Reduction::kMean);
         c.constructor.done();
         const auto x = c.call.get<Tensor>(0, "input"), t = c.call.get<Tensor>(1, "target");
         return Outputs{F::mse_loss(x, t, r)};
       }},
  };
  return all;
}

}  // namespace

void run_modules(const std::string& folder, Report& report) {
  const Tensors buffers = load_safetensors(folder + "/tensors.safetensors");
  std::ifstream lines(folder + "/cases.jsonl");
  if (!lines) fail("[conformance] ", folder, " holds no cases.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const Json test = Json::parse(line);
    const std::string name = test["module"], id = test["id"];
    report.run(name, test, buffers, [&](Decoder& decoder) {
      auto runner = runners().find(name);
      if (runner == runners().end()) throw Unsupported("no such module");
      const size_t slash = id.find('/') + 1;
      Case c{test, decoder,
             decoder.dtype(parse_dtype(id.substr(slash, id.find('/', slash) - slash))),
             Arguments(decoder, test["ctor"]["args"], test["ctor"]["kwargs"], "ctor.", "ctor."),
             Arguments(decoder, test["args"], test["kwargs"], "args.", "kwargs.")};
      return runner->second(c);
    });
  }
}

}  // namespace sherd::test
