// The main job: BigModel trained on text, fully sharded over the ranks of this machine or of
// several.
//
//     ./bazelw run //examples:big_model                # 2 ranks, English text, some minutes
//     ./bazelw run //examples:big_model -- --data=my.txt --nproc_per_node=4 --precision=bf16
//     sherdrun --nproc_per_node=2 big_model --data=tokens.bin     # or under a launcher
#include "examples/big_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "core/peak.h"
#include "examples/support/corpus.h"
#include "examples/support/generate.h"
#include "examples/support/options.h"
#include "examples/support/report.h"
#include "examples/support/run_state.h"

namespace examples {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point t) {
  return std::chrono::duration<double, std::milli>(Clock::now() - t).count();
}

// Floating point operations of a training step, a token: 2 a multiply-add; backward costs twice
// forward.
double flops_per_token(const Options& o) {
  const double block = 4.0 * o.dim * o.dim + 2.0 * o.dim * o.ff_dim;
  const double scores = 2.0 * o.seq_len * o.dim * (o.causal ? 0.5 : 1);
  return 6 * (double(o.layers) * (block + scores) + double(o.dim) * o.vocab_size);
}

class Training {
 public:
  explicit Training(const Options& options);
  void run();

 private:
  struct Reduced {
    double loss, peak_mib;
  };

  Tensor forward(const Tensor& ids) { return nn::call(model_, ids); }
  Tensor forward(const data::Batch& batch) {
    if (!o_.pack_documents) return forward(batch.at("input_ids"));
    return nn::call(model_, batch.at("input_ids"),
                    data::hidden_documents(batch.at("document_ids"), o_.heads, o_.causal));
  }
  void wrap();
  void start();
  void train();
  Reduced over_ranks(double loss_sum) const;
  dist::CollectiveCounts counts() const;  // of all groups
  void evaluate(int64_t step);
  void sample();
  nlohmann::json config() const;
  dist::TrainingState state() {
    return {
        .model = fsdp_ ? dist::ModelState(*fsdp_) : dist::ModelState(model_, dist::default_group()),
        .optimizer = &*optimizer_,
        .scheduler = schedule_.get(),
        .loader = loader_.get(),
        .step = step_,
        .user = config()};
  }

  Options o_;
  Corpus corpus_;
  BigModel model_;
  std::optional<FullyShardedDataParallel<BigModel>> fsdp_;
  std::optional<DistributedDataParallel<BigModel>> ddp_;
  std::optional<optim::AdamW> optimizer_;
  std::optional<ShardedGradScaler> scaler_;  // of fp16
  std::unique_ptr<optim::LRScheduler> schedule_;
  std::unique_ptr<data::DistributedSampler> sampler_;
  std::unique_ptr<data::DataLoader> loader_;
  std::optional<nn::NanCheck> nan_check_;
  std::unique_ptr<Reporter> reporter_;
  std::optional<dist::Checkpointer> checkpointer_;
  int64_t step_ = 0;
};

Corpus load_on_every_rank(const Options& o) {
  // Rank 0 first: it trains the tokenizer, the others find it in the cache.
  Corpus c;
  std::string error;
  for (int turn = 0; turn < 2; ++turn) {
    if ((dist::rank() == 0) == (turn == 0)) {
      try {
        c = load_corpus(o);
      } catch (const Error& e) {
        error = e.what();
      }
    }
    dist::barrier();
  }
  if (!error.empty()) throw UsageError(error);
  return c;
}

Training::Training(const Options& options)
    : o_(options),
      corpus_(load_on_every_rank(options)),
      model_(o_.layers, o_.dim, o_.ff_dim, o_.vocab_size,
             {.heads = o_.heads,
              .causal = o_.causal,
              .activation_checkpointing = o_.activation_checkpointing}) {
  default_generator().seed(uint64_t(o_.seed), uint64_t(dist::rank()));
  if (o_.precision == "bf16") {
    Tensor choice = tensor<int64_t>({int64_t(bf16_products())});
    dist::broadcast(choice, 0);
    set_bf16_products(Bf16Products(choice.item<int64_t>()));
  }
  wrap();
  if (o_.nan_check) nan_check_.emplace(model_);
  optimizer_.emplace(
      fsdp_ ? fsdp_->named_parameters() : model_.named_parameters(),
      optim::AdamWOptions{
          .lr = o_.lr, .betas = {o_.beta1, o_.beta2}, .weight_decay = o_.weight_decay});
  if (o_.schedule == "cosine")
    schedule_ = std::make_unique<optim::WarmupCosineLR>(
        *optimizer_, optim::WarmupCosineOptions{.warmup_steps = o_.warmup_steps,
                                                .total_steps = std::max<int64_t>(1, o_.steps),
                                                .min_lr = o_.min_lr});
  else
    schedule_ = std::make_unique<optim::LambdaLR>(*optimizer_, [w = o_.warmup_steps](int64_t t) {
      return t < w ? double(t + 1) / double(w) : 1.0;
    });
  sampler_ = std::make_unique<data::DistributedSampler>(
      corpus_.train->size(), data::DistributedOptions{.num_replicas = dist::world_size(),
                                                      .rank = dist::rank(),
                                                      .shuffle = o_.shuffle,
                                                      .seed = uint64_t(o_.seed),
                                                      .drop_last = true});
  loader_ = std::make_unique<data::DataLoader>(*corpus_.train,
                                               data::LoaderOptions{.batch_size = o_.batch_size,
                                                                   .sampler = sampler_.get(),
                                                                   .num_workers = 1,
                                                                   .drop_last = true});
  if (loader_->size() == 0 && o_.steps > 0)
    throw UsageError(concat("the data make ", corpus_.train->size(), " samples of ", o_.seq_len,
                            " tokens: too few for a batch of ", o_.batch_size, " on each of ",
                            dist::world_size(), " ranks"));
  reporter_ = std::make_unique<Reporter>(dist::rank() == 0, o_.log_jsonl, config());
  start();
}

void Training::wrap() {
  const MixedPrecision precision =
      o_.precision == "bf16"   ? MixedPrecision{.param_dtype = kBFloat16, .reduce_dtype = kFloat32}
      : o_.precision == "fp16" ? MixedPrecision{.param_dtype = kFloat16, .reduce_dtype = kFloat32}
                               : MixedPrecision{};
  if (o_.precision == "fp16") scaler_.emplace();
  if (o_.strategy == "none") {
    if (dist::world_size() > 1 || o_.precision != "fp32")
      throw UsageError("--strategy=none trains without a wrapper: on one rank, in fp32");
    model_.materialize();
    return;
  }
  // Data parallelism with a lower precision is FSDP that cuts nothing: master weights and a copy to
  // compute with.
  if (o_.strategy == "ddp" && o_.precision == "fp32") {
    ddp_.emplace(model_);
    return;
  }
  // One rank has nothing to shard, which FSDP would say: here nobody asked for it.
  const bool whole = o_.strategy == "ddp" || dist::world_size() == 1;
  FsdpOptions options{
      .auto_wrap_policy = o_.wrap_min_params > 0 ? size_based_auto_wrap_policy(o_.wrap_min_params)
                                                 : module_wrap_policy<LargeTransformerBlock>(),
      .sharding_strategy = sharding_strategy(whole ? "no_shard" : o_.strategy),
      .mixed_precision = precision,
      .backward_prefetch = o_.backward_prefetch == "pre"    ? BackwardPrefetch::kPre
                           : o_.backward_prefetch == "post" ? BackwardPrefetch::kPost
                                                            : BackwardPrefetch::kNone,
      .gather_in_backward = GatherInBackward::kIfSaved,
      .cpu_offload = {.offload_params = o_.cpu_offload}};
  const int world = dist::world_size(), shard = o_.shard_group_size;
  if (shard > 0 && world % shard != 0)
    throw UsageError(concat("--shard_group_size=", shard, " does not divide ", world, " ranks"));
  if (shard > 0)
    options.device_mesh = dist::init_device_mesh({world / shard, shard}, {"replicate", "shard"});
  fsdp_.emplace(model_, options);
}

nlohmann::json Training::config() const {
  nlohmann::json j = {
      {"strategy", fsdp_ && o_.strategy == "ddp" ? "no_shard" : o_.strategy},
      {"world_size", dist::world_size()},
      {"backend", dist::default_group()->backend()},
      {"device", to_string(dist::local_device())},
      {"shard_group_size", fsdp_ ? dist::size_of_group(fsdp_->units()[0]->options().shard) : 1},
      {"precision", o_.precision},
      {"backward_prefetch",
       !fsdp_                                                                     ? "none"
       : fsdp_->runtime()->options().backward_prefetch == BackwardPrefetch::kPre  ? "pre"
       : fsdp_->runtime()->options().backward_prefetch == BackwardPrefetch::kPost ? "post"
                                                                                  : "none"},
      {"units", fsdp_  ? int64_t(fsdp_->units().size())
                : ddp_ ? ddp_->num_buckets()
                       : 0},
      {"layers", o_.layers},
      {"dim", o_.dim},
      {"ff_dim", o_.ff_dim},
      {"heads", o_.heads},
      {"vocab_size", o_.vocab_size},
      {"seq_len", o_.seq_len},
      {"causal", o_.causal},
      {"parameters", 0},
      {"batch_size", o_.batch_size},
      {"accumulate", o_.accumulate},
      {"steps", o_.steps},
      {"lr", o_.lr},
      {"schedule", o_.schedule},
      {"seed", o_.seed},
      {"pack_documents", o_.pack_documents},
      {"threads", num_threads()},
      {"activation_checkpointing", o_.activation_checkpointing}};
  int64_t n = 0;
  if (fsdp_)
    for (auto& u : fsdp_->units()) n += u->num_parameters();
  else
    n = model_.num_parameters();
  j["parameters"] = n;
  if (o_.precision == "bf16") j["bf16_products"] = describe_bf16_products();
  if (scaler_)
    j["grad_scaler"] = {{"scale", scaler_->get_scale()},
                        {"growth_tracker", scaler_->growth_tracker()}};
  return j;
}

void Training::start() {
  dist::TrainingState now = state();
  const bool any = open_checkpoints(o_);
  if (!o_.checkpoint_dir.empty())
    checkpointer_.emplace(o_.checkpoint_dir, dist::default_group(), checkpointer_options(o_));
  if (any) {
    const auto path = resume(*checkpointer_, now);
    step_ = now.step;
    if (scaler_ && now.user.contains("grad_scaler")) {
      nn::StateDict scaler = scaler_->state_dict();
      const nlohmann::json& saved = now.user["grad_scaler"];
      scaler.set("scale", full({}, saved["scale"].get<double>(), kFloat64));
      scaler.set("growth_tracker", full({}, saved["growth_tracker"].get<double>(), kInt64));
      scaler_->load_state_dict(scaler);
    }
    reporter_->say("resumed from " + *path);
    return;
  }
  if (o_.resume) reporter_->say("no checkpoint in " + o_.checkpoint_dir + ": starting afresh");
  if (o_.init_from.empty()) return;
  try {
    dist::load_weights_from(o_.init_from, now.model);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

// ---- training
Training::Reduced Training::over_ranks(double loss_sum) const {
  const int w = dist::world_size();
  Tensor mine = tensor<double>({loss_sum, double(memory_stats().peak) / (1 << 20)}),
         all = empty({2 * w}, kFloat64);
  dist::all_gather_into_tensor(all, mine);
  Reduced r{0, 0};
  for (int k = 0; k < w; ++k) {
    r.loss += all.data<double>()[2 * k];
    r.peak_mib = std::max(r.peak_mib, all.data<double>()[2 * k + 1]);
  }
  r.loss /= w;
  return r;
}

dist::CollectiveCounts Training::counts() const {
  std::set<dist::Group> groups = {dist::default_group()};
  if (fsdp_)
    for (auto& u : fsdp_->units())
      for (const dist::Group& g : {u->options().shard, u->options().replicate})
        if (g) groups.insert(g);
  dist::CollectiveCounts sum;
  for (auto& g : groups) {
    const dist::CollectiveCounts c = g->counts();
    for (auto kind : {&dist::CollectiveCounts::all_gather, &dist::CollectiveCounts::reduce_scatter,
                      &dist::CollectiveCounts::all_reduce, &dist::CollectiveCounts::broadcast,
                      &dist::CollectiveCounts::other})
      (sum.*kind).calls += (c.*kind).calls, (sum.*kind).bytes += (c.*kind).bytes;
    sum.waited_ns += c.waited_ns;
  }
  return sum;
}

void Training::train() {
  const double peak = 1e9 * fma_peak() * num_threads();
  const int64_t tokens = o_.batch_size * o_.accumulate * o_.seq_len * dist::world_size();
  const double max_norm = o_.max_norm > 0 ? o_.max_norm : INFINITY;
  auto batches = loader_->begin();
  while (step_ < o_.steps) {
    const auto start = Clock::now();
    reset_peak_memory();
    const auto before = counts();
    double loss_sum = 0;
    for (int64_t micro = 0; micro < o_.accumulate; ++micro) {
      std::optional<FsdpModule::NoSync> fsdp_waits;
      std::optional<DistributedDataParallel<BigModel>::NoSync> ddp_waits;
      if (micro + 1 < o_.accumulate) {
        if (fsdp_) fsdp_waits.emplace(fsdp_->runtime());
        if (ddp_) ddp_waits.emplace(ddp_->reducer());
      }
      if (batches == loader_->end()) batches = loader_->begin();  // the next epoch
      data::Batch& batch = *batches;
      const Tensor logits = forward(batch);
      Tensor loss =
          F::cross_entropy(logits.view({-1, o_.vocab_size}), batch.at("labels").view({-1}));
      if (loss.dtype() != kFloat32) loss = loss.to(kFloat32);
      loss = loss * (1.0 / double(o_.accumulate));
      loss_sum += loss.item();
      (scaler_ ? scaler_->scale(loss) : loss).backward();
      ++batches;
    }
    // fp16's may overflow: the scaler sees to that.
    if (nan_check_ && !scaler_) nan_check_->gradients();
    const double lr = optimizer_->lr(0);
    if (scaler_) scaler_->unscale_(*optimizer_);
    const auto clip =
        optim::clip_coefficient(fsdp_ ? fsdp_->parameters() : model_.parameters(), max_norm);
    if (scaler_) {
      scaler_->step(*optimizer_, {.grad_scale = clip.coefficient});
      scaler_->update();
    } else {
      optimizer_->step({.grad_scale = clip.coefficient});
    }
    optimizer_->zero_grad();
    schedule_->step();
    ++step_;

    const Reduced all = over_ranks(loss_sum);
    const auto after = counts();
    StepReport r;
    r.step = step_, r.steps = o_.steps, r.loss = all.loss, r.grad_norm = clip.norm.item(),
    r.lr = lr;
    r.step_ms = milliseconds_since(start);
    r.tokens_per_s = double(tokens) / r.step_ms * 1e3;
    r.peak_mem_mib = all.peak_mib;
    r.flops_share = r.tokens_per_s / dist::world_size() * flops_per_token(o_) / peak;
    auto add = [&](const char* name, auto count) {
      const int64_t bytes = (after.*count).bytes - (before.*count).bytes;
      r.extra[name] = {{"calls", (after.*count).calls - (before.*count).calls}, {"bytes", bytes}};
      if (dist::world_size() > 1) r.comm_bytes += bytes;
    };
    add("all_gather", &dist::CollectiveCounts::all_gather);
    add("reduce_scatter", &dist::CollectiveCounts::reduce_scatter);
    add("all_reduce", &dist::CollectiveCounts::all_reduce);
    r.exposed_ms = double(after.waited_ns - before.waited_ns) * 1e-6;
    reporter_->step(r);
    if (!std::isfinite(all.loss))
      fail("the loss is ", all.loss, " at step ", step_,
           ": try a smaller --lr, or --nan_check to see where it comes from");

    const bool last = step_ == o_.steps;
    if (o_.eval_interval > 0 && (last || step_ % o_.eval_interval == 0)) evaluate(step_);
    if (o_.save_interval > 0 && (last || step_ % o_.save_interval == 0)) {
      o_.async_save ? checkpointer_->async_save(state()) : checkpointer_->save(state());
    }
  }
}

void Training::evaluate(int64_t step) {
  if (!corpus_.validation) return;
  NoGrad off;
  model_.eval();
  const int64_t n = corpus_.validation->size(), w = dist::world_size(), b = o_.batch_size,
                t = o_.seq_len;
  double sum = 0, count = 0;
  // Every rank runs as many forwards; what is beyond the end is masked, so each sample counts once.
  for (int64_t first = 0; first < n; first += w * b) {
    std::map<std::string, std::vector<Tensor>> columns;
    for (int64_t k = 0; k < b; ++k) {
      const int64_t i = first + k * w + dist::rank();
      data::Sample s = corpus_.validation->get(std::min(i, n - 1));
      if (i >= n) s.at("labels") = full({t}, -100, kInt64);
      for (auto& [name, x] : s) columns[name].push_back(x);
    }
    data::Batch batch;
    for (auto& [name, list] : columns) batch.set(name, stack(list));
    const Tensor labels = batch.at("labels").view({-1}), logits = forward(batch);
    count += double(std::count_if(labels.data<int64_t>(), labels.data<int64_t>() + labels.numel(),
                                  [](int64_t label) { return label != -100; }));
    sum += F::cross_entropy(logits.view({-1, o_.vocab_size}).to(kFloat32), labels,
                            {.reduction = Reduction::kSum})
               .item();
  }
  Tensor totals = tensor<double>({sum, count});
  dist::all_reduce(totals);
  model_.train();
  const double loss = totals.data<double>()[0] / totals.data<double>()[1];
  reporter_->validation(
      step, loss, corpus_.bytes_per_token > 0 ? loss / std::log(2.0) / corpus_.bytes_per_token : 0);
}

void Training::sample() {
  if (!corpus_.tokenizer || o_.max_new_tokens == 0) return;
  model_.eval();
  const auto ids =
      generate([&](const Tensor& x) { return forward(x); }, corpus_.tokenizer->encode(o_.prompt),
               {.max_new_tokens = o_.max_new_tokens,
                .context = o_.seq_len,
                .temperature = o_.temperature,
                .top_k = o_.top_k,
                .seed = uint64_t(o_.seed)});
  model_.train();
  reporter_->say("\n" + corpus_.tokenizer->decode(ids) + "\n");
}

void Training::run() {
  const nlohmann::json c = config();
  reporter_->say(concat("BigModel, ", c["parameters"].get<int64_t>(), " parameters, ", o_.strategy,
                        " over ", dist::world_size(), " rank(s), ", o_.precision, "; ",
                        corpus_.description));
  if (step_ == 0 && o_.eval_interval > 0 && o_.steps > 0) evaluate(0);
  train();
  if (checkpointer_) checkpointer_->wait();
  if (!o_.save_weights.empty()) {
    dist::ModelState model = state().model;
    dist::save_weights(o_.save_weights, model);
  }
  sample();
  std::string where;
  if (o_.save_interval > 0 && o_.steps > 0) where = "checkpoint: " + o_.checkpoint_dir + "  ";
  if (!o_.save_weights.empty()) where += "weights: " + o_.save_weights + "  ";
  reporter_->say(
      where +
      "next: --steps=2000, --data=YOUR.txt, --precision=bf16, --nproc_per_node=4 (see --help)");
}

int train(const Options& o) {
  if (o.threads > 0) set_num_threads(o.threads);
  dist::init_process_group();
  Training(o).run();
  dist::destroy_process_group();
  return 0;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) {
  int code = 0;
  const auto options = examples::parse_options(argc, argv, code);
  if (!options) return code;
  if (!options->backend.empty()) setenv("SHERD_BACKEND", options->backend.c_str(), 1);
  try {
    const std::string n = options->nproc_per_node.empty() ? "2" : options->nproc_per_node;
    if (auto result = sherd::dist::launch_self(sherd::dist::parse_nproc_per_node(n), argc, argv))
      return *result;
  } catch (const sherd::Error& e) {
    std::fprintf(stderr, "big_model: %s\n", e.what());
    return 2;
  }
  try {
    return examples::train(*options);
  } catch (const examples::UsageError& e) {
    std::fprintf(stderr, "big_model: %s\n", e.what());
    std::_Exit(2);  // the other ranks are leaving for the same reason: nobody waits for the group
  } catch (const std::exception& e) {
    std::fprintf(stderr, "big_model: rank %s: %s\n",
                 std::getenv("RANK") ? std::getenv("RANK") : "0", e.what());
    std::_Exit(1);
  }
}
