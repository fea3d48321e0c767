#include "examples/support/setup.h"

#include <algorithm>

#include "examples/support/run_state.h"

namespace examples {

using namespace sherd;

Corpus load_on_every_rank(const Options& o) {
  Corpus c;
  std::string error;
  for (int turn = 0; turn < 2; ++turn) {
    if ((dist::rank() == 0) == (turn == 0)) {
      try {
        c = load_corpus(o);
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    dist::barrier();
  }
  if (!error.empty()) throw UsageError(error);
  return c;
}

FsdpOptions fsdp_options(const Options& o, const WrapPolicy& blocks) {
  // One rank has nothing to shard, which FSDP would say: here nobody asked for it.
  const bool whole = o.strategy == "ddp" || dist::world_size() == 1;
  FsdpOptions options{
      .auto_wrap_policy =
          o.wrap_min_params > 0 ? size_based_auto_wrap_policy(o.wrap_min_params) : blocks,
      .sharding_strategy = sharding_strategy(whole ? "no_shard" : o.strategy),
      .backward_prefetch = o.backward_prefetch == "pre"    ? BackwardPrefetch::kPre
                           : o.backward_prefetch == "post" ? BackwardPrefetch::kPost
                                                           : BackwardPrefetch::kNone,
      .gather_in_backward = GatherInBackward::kIfSaved,
      .cpu_offload = {.offload_params = o.cpu_offload}};
  if (o.precision != "fp32")
    options.mixed_precision = {.param_dtype = o.precision == "bf16" ? kBFloat16 : kFloat16,
                               .reduce_dtype = kFloat32};
  const int world = dist::world_size(), shard = o.shard_group_size;
  if (shard > 0 && world % shard != 0)
    throw UsageError(concat("--shard_group_size=", shard, " does not divide ", world, " ranks"));
  if (shard > 0 && !whole)
    options.device_mesh = dist::init_device_mesh({world / shard, shard}, {"replicate", "shard"});
  return options;
}

std::unique_ptr<optim::LRScheduler> make_schedule(const Options& o, optim::Optimizer& optimizer) {
  if (o.schedule == "cosine")
    return std::make_unique<optim::WarmupCosineLR>(
        optimizer, optim::WarmupCosineOptions{.warmup_steps = o.warmup_steps,
                                              .total_steps = std::max<int64_t>(1, o.steps),
                                              .min_lr = o.min_lr});
  return std::make_unique<optim::LambdaLR>(optimizer, [w = o.warmup_steps](int64_t t) {
    return t < w ? double(t + 1) / double(w) : 1.0;
  });
}

nlohmann::json to_json(const ShardedGradScaler& scaler) {
  return {{"scale", scaler.get_scale()}, {"growth_tracker", scaler.growth_tracker()}};
}

void load(ShardedGradScaler& scaler, const nlohmann::json& saved) {
  nn::StateDict state = scaler.state_dict();
  state.set("scale", full({}, saved.at("scale").get<double>(), kFloat64));
  state.set("growth_tracker", full({}, saved.at("growth_tracker").get<double>(), kInt64));
  scaler.load_state_dict(state);
}

nlohmann::json describe_run(const Options& o, const nn::Module& model, const FsdpModule* fsdp,
                            const dist::DdpReducer* ddp) {
  const FsdpOptions* how = fsdp ? &fsdp->runtime()->options() : nullptr;
  int64_t parameters = 0;
  if (fsdp)
    for (auto& u : fsdp->units()) parameters += u->num_parameters();
  else
    parameters = model.num_parameters();
  nlohmann::json j = {
      {"strategy", fsdp && o.strategy == "ddp" ? "no_shard" : o.strategy},
      {"world_size", dist::world_size()},
      {"backend", dist::default_group()->backend()},
      {"device", to_string(dist::local_device())},
      {"shard_group_size", fsdp ? dist::size_of_group(fsdp->units()[0]->options().shard) : 1},
      {"precision", o.precision},
      {"backward_prefetch", !fsdp                                               ? "none"
                            : how->backward_prefetch == BackwardPrefetch::kPre  ? "pre"
                            : how->backward_prefetch == BackwardPrefetch::kPost ? "post"
                                                                                : "none"},
      {"units", fsdp  ? int64_t(fsdp->units().size())
                : ddp ? int64_t(ddp->num_buckets())
                      : 0},
      {"layers", o.layers},
      {"dim", o.dim},
      {"ff_dim", o.ff_dim},
      {"heads", o.heads},
      {"vocab_size", o.vocab_size},
      {"seq_len", o.seq_len},
      {"causal", o.causal},
      {"parameters", parameters},
      {"batch_size", o.batch_size},
      {"accumulate", o.accumulate},
      {"steps", o.steps},
      {"lr", o.lr},
      {"min_lr", o.min_lr},
      {"warmup_steps", o.warmup_steps},
      {"schedule", o.schedule},
      {"beta1", o.beta1},
      {"beta2", o.beta2},
      {"weight_decay", o.weight_decay},
      {"max_norm", o.max_norm},
      {"shuffle", o.shuffle},
      {"seed", o.seed},
      {"pack_documents", o.pack_documents},
      {"threads", num_threads()},
      {"activation_checkpointing", o.activation_checkpointing}};
  if (o.precision == "bf16") j["bf16_products"] = describe_bf16_products();
  return j;
}

}  // namespace examples
