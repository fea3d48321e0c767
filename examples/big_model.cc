// The main job: BigModel trained on text, fully sharded over the ranks of this machine or of
// several.
//
//     ./bazelw run //examples:big_model                # 2 ranks, English text, some minutes
//     ./bazelw run //examples:big_model -- --data=my.txt --nproc_per_node=4 --precision=bf16
//     sherdrun --nproc_per_node=2 big_model --data=tokens.bin     # or under a launcher
#include "examples/big_model.h"

#include <cmath>

#include "cli/kept_tokenizer.h"
#include "distributed/agree.h"
#include "examples/support/corpus.h"
#include "examples/support/evaluate.h"
#include "examples/support/generate.h"
#include "examples/support/last_words.h"
#include "examples/support/main.h"
#include "examples/support/options.h"
#include "examples/support/printable.h"
#include "examples/support/report.h"
#include "examples/support/run_state.h"
#include "examples/support/setup.h"
#include "examples/support/step_meter.h"

namespace examples {
namespace {

class Training {
 public:
  explicit Training(const Options& options);
  void run();

 private:
  Tensor forward(const data::Batch& batch);
  void wrap();
  void start();
  void set_options();
  void train();
  double backward(data::DataLoader::Iterator& batches);
  double step_optimizer();
  void save_checkpoint();
  std::string how_to_go_on() const;
  void remember_checkpoint(const std::string& path);
  void need_finite_weights();
  void keep_tokenizer_at(const std::string& path);
  void evaluate();
  void sample();
  void say_what_next();
  nlohmann::json config() const;
  dist::TrainingState state();

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
  RunFolder folder_;
  bool tokenizer_is_kept_ = false;  // beside this run's checkpoints
  std::optional<dist::Checkpointer> checkpointer_;
  int64_t step_ = 0, saving_step_ = 0;  // saving: of a save that may be under way
};

Training::Training(const Options& options)
    : o_(options),
      corpus_(load_on_every_rank(options)),
      model_(o_.layers, o_.dim, o_.ff_dim, o_.vocab_size,
             {.heads = o_.heads,
              .causal = o_.causal,
              .activation_checkpointing = o_.activation_checkpointing}) {
  default_generator().seed(uint64_t(o_.seed), uint64_t(dist::rank()));
  wrap();
  if (o_.nan_check) nan_check_.emplace(model_);
  optimizer_.emplace(
      fsdp_ ? fsdp_->named_parameters() : model_.named_parameters(),
      optim::AdamWOptions{
          .lr = o_.lr, .betas = {o_.beta1, o_.beta2}, .weight_decay = o_.weight_decay});
  schedule_ = make_schedule(o_, *optimizer_);
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
  all_or_usage_error(
      [&] { reporter_ = std::make_unique<Reporter>(dist::rank() == 0, o_.log_jsonl); });
  start();
  reporter_->begin(config(), /*goes_on=*/o_.resume);
  // Last, when all that may be refused was.
  if (folder_.is_to_be_emptied) empty_run_folder(o_);
}

void Training::wrap() {
  if (o_.precision == "fp16") scaler_.emplace();
  if (o_.strategy == "none") {
    if (dist::world_size() > 1 || o_.precision != "fp32")
      throw UsageError(
          "--strategy=none trains without a wrapper, on one rank and in fp32: give "
          "--nproc_per_node=1 and --precision=fp32");
    model_.materialize();
  } else if (o_.strategy == "ddp" && o_.precision == "fp32") {
    ddp_.emplace(model_);
  } else {
    // Data parallelism with a lower precision is FSDP that cuts nothing: master weights and a copy
    // to compute with.
    fsdp_.emplace(model_, fsdp_options(o_, module_wrap_policy<LargeTransformerBlock>()));
  }
}

nlohmann::json Training::config() const {
  nlohmann::json j =
      describe_run(o_, model_, fsdp_ ? &*fsdp_ : nullptr, ddp_ ? ddp_->reducer().get() : nullptr);
  if (scaler_) j["grad_scaler"] = to_json(*scaler_);
  if (corpus_.tokenizer) j["tokenizer"] = corpus_.tokenizer->fingerprint();
  return j;
}

dist::TrainingState Training::state() {
  return {
      .model = fsdp_ ? dist::ModelState(*fsdp_) : dist::ModelState(model_, dist::default_group()),
      .optimizer = &*optimizer_,
      .scheduler = schedule_.get(),
      .loader = loader_.get(),
      .step = step_,
      .user = config()};
}

// After a checkpoint was loaded: what the command line says counts.
void Training::set_options() {
  auto& group = optimizer_->param_groups()[0];
  group.betas = {o_.beta1, o_.beta2};
  group.weight_decay = o_.weight_decay;
  optimizer_->set_initial_lr(0, o_.lr);
  schedule_->step(schedule_->last_epoch());
}

// From a checkpoint, from weights, or afresh.
void Training::start() {
  dist::TrainingState now = state();
  folder_ = open_run_folder(o_);
  if (!o_.checkpoint_dir.empty())
    checkpointer_.emplace(o_.checkpoint_dir, dist::default_group(), checkpointer_options(o_));
  if (folder_.has_checkpoints) {
    const auto path = resume(*checkpointer_, now);
    const std::string changed = differences(now.user, config());
    step_ = now.step;
    set_options();
    if (scaler_ && now.user.contains("grad_scaler")) load(*scaler_, now.user["grad_scaler"]);
    remember_checkpoint(*path);
    reporter_->say("resumed from " + *path);
    if (!changed.empty())
      reporter_->say("differs from the checkpoint, and is as given now: " + changed);
    if (step_ >= o_.steps)
      reporter_->say(concat("nothing to train: the checkpoint is of step ", step_,
                            ", and --steps=", o_.steps));
    return;
  }
  if (o_.resume) reporter_->say("no checkpoint in " + o_.checkpoint_dir + ": starting afresh");
  if (!o_.init_from.empty()) load_initial_weights(o_.init_from, now.model, config());
}

Tensor Training::forward(const data::Batch& batch) {
  if (!o_.pack_documents) return nn::call(model_, batch.at("input_ids"));
  return nn::call(model_, batch.at("input_ids"),
                  data::hidden_documents(batch.at("document_ids"), o_.heads, o_.causal));
}

// All micro-batches of a step. Returns the loss of this rank's samples.
double Training::backward(data::DataLoader::Iterator& batches) {
  double sum = 0;
  for (int64_t micro = 0; micro < o_.accumulate; ++micro) {
    std::optional<FsdpModule::NoSync> fsdp_waits;
    std::optional<DistributedDataParallel<BigModel>::NoSync> ddp_waits;
    if (micro + 1 < o_.accumulate) {
      if (fsdp_) fsdp_waits.emplace(fsdp_->runtime());
      if (ddp_) ddp_waits.emplace(ddp_->reducer());
    }
    if (batches == loader_->end()) batches = loader_->begin();  // the next epoch
    const data::Batch& batch = *batches;
    const Tensor logits = forward(batch);
    Tensor loss = F::cross_entropy(logits.view({-1, o_.vocab_size}), batch.at("labels").view({-1}));
    if (loss.dtype() != kFloat32) loss = loss.to(kFloat32);
    loss = loss * (1.0 / double(o_.accumulate));
    sum += loss.item();
    (scaler_ ? scaler_->scale(loss) : loss).backward();
    ++batches;
  }
  return sum;
}

// Returns the norm of the gradients before they were clipped.
double Training::step_optimizer() {
  // fp16's may overflow: the scaler sees to that.
  if (nan_check_ && !scaler_) nan_check_->gradients();
  if (scaler_) scaler_->unscale_(*optimizer_);
  const auto clip = optim::clip_coefficient(fsdp_ ? fsdp_->parameters() : model_.parameters(),
                                            o_.max_norm > 0 ? o_.max_norm : INFINITY);
  if (scaler_) {
    scaler_->step(*optimizer_, {.grad_scale = clip.coefficient});
    scaler_->update();
  } else {
    optimizer_->step({.grad_scale = clip.coefficient});
  }
  optimizer_->zero_grad();
  schedule_->step();
  return clip.norm.item();
}

void Training::train() {
  StepMeter meter(o_, fsdp_ ? &*fsdp_ : nullptr);
  auto batches = loader_->begin();
  while (step_ < o_.steps) {
    meter.begin();
    const double lr = optimizer_->lr(0), mine = backward(batches), norm = step_optimizer();
    const StepReport report = meter.end(++step_, mine, norm, lr);
    reporter_->step(report);
    if (!std::isfinite(report.loss))
      fail("the loss is ", report.loss, " at step ", step_,
           ": try a smaller --lr, or --nan_check to see where it comes from");
    const auto is_due = [&](int64_t interval) {
      return interval > 0 && (step_ == o_.steps || step_ % interval == 0);
    };
    if (is_due(o_.eval_interval)) evaluate();
    if (is_due(o_.save_interval)) save_checkpoint();
  }
}

void Training::save_checkpoint() {
  need_finite_weights();
  dist::all_or_none(dist::default_group(), [&] {
    if (folder_.lock) folder_.lock->need_held();
  });
  if (!std::exchange(tokenizer_is_kept_, true))
    keep_tokenizer_at(cli::tokenizer_of_run(o_.checkpoint_dir));
  o_.async_save ? checkpointer_->async_save(state()) : checkpointer_->save(state());
  // An asynchronous one waits for the one before.
  const int64_t whole = o_.async_save ? std::exchange(saving_step_, step_) : step_;
  if (whole > 0) remember_checkpoint(o_.checkpoint_dir + "/" + dist::checkpoint_name(whole));
}

std::string Training::how_to_go_on() const {
  return "go on: --resume --checkpoint_dir=" + o_.checkpoint_dir;
}

// For who ends the run before its time.
void Training::remember_checkpoint(const std::string& path) {
  if (dist::rank() == 0)
    set_last_words(concat("the last checkpoint is ", path, "; ", how_to_go_on()));
}

// A collective.
void Training::keep_tokenizer_at(const std::string& path) {
  dist::all_or_none(dist::default_group(), [&] {
    if (dist::rank() == 0) keep_tokenizer(corpus_, path);
  });
}

// What is saved can be gone on from. A collective.
void Training::need_finite_weights() {
  dist::all_or_none(dist::default_group(), [&] {
    for (auto& [name, p] : fsdp_ ? fsdp_->named_parameters() : model_.named_parameters())
      if (const std::string what = nn::find_non_finite(p); !what.empty())
        fail("parameter ", name, " holds ", what, " after step ", step_,
             ", so nothing is saved: try a smaller --lr");
  });
}

void Training::evaluate() {
  if (!corpus_.validation) return;
  model_.eval();
  const double loss = validation_loss(*corpus_.validation, o_.batch_size,
                                      [&](const data::Batch& batch) { return forward(batch); });
  model_.train();
  if (!std::isfinite(loss))
    fail("the validation loss is ", loss, " after step ", step_,
         ": try a smaller --lr, or --nan_check to see where it comes from");
  reporter_->validation(
      step_, loss,
      corpus_.bytes_per_token > 0 ? loss / std::log(2.0) / corpus_.bytes_per_token : 0);
}

void Training::sample() {
  if (!corpus_.tokenizer || o_.max_new_tokens == 0) return;
  model_.eval();
  const auto ids = generate([&](const Tensor& x) { return nn::call(model_, x); },
                            corpus_.tokenizer->encode(o_.prompt),
                            {.max_new_tokens = o_.max_new_tokens,
                             .context = o_.seq_len,
                             .temperature = o_.temperature,
                             .top_k = o_.top_k,
                             .vocab_size = corpus_.tokenizer->vocab_size(),
                             .seed = uint64_t(o_.seed)});
  model_.train();
  reporter_->say("\n" + printable(corpus_.tokenizer->decode(ids)) + "\n");
}

void Training::run() {
  reporter_->say(concat("BigModel, ", config()["parameters"].get<int64_t>(), " parameters, ",
                        o_.strategy, " over ", dist::world_size(), " rank(s), ", o_.precision, "; ",
                        corpus_.description));
  if (o_.save_interval > 0 && step_ < o_.steps)
    reporter_->say(concat("checkpoints, the last two, every ", o_.save_interval,
                          " steps: ", o_.checkpoint_dir));
  if (step_ == 0 && o_.eval_interval > 0 && o_.steps > 0) evaluate();
  train();
  if (checkpointer_) checkpointer_->wait();
  if (saving_step_ > 0)
    remember_checkpoint(o_.checkpoint_dir + "/" + dist::checkpoint_name(saving_step_));
  if (!o_.save_weights.empty()) {
    need_finite_weights();
    dist::ModelState model = state().model;
    dist::save_weights(o_.save_weights, model);
    keep_tokenizer_at(cli::tokenizer_of_weights(o_.save_weights));
  }
  sample();
  say_what_next();
}

// In one line, the last.
void Training::say_what_next() {
  std::string line;
  if (!o_.save_weights.empty()) line = "weights: " + o_.save_weights + "  ";
  if (o_.save_interval > 0 && o_.steps > 0)
    line += concat("checkpoint: ", o_.checkpoint_dir, "  ", how_to_go_on(),
                   " --steps=", 2 * o_.steps, " and the same other flags  ");
  reporter_->say(
      line +
      "next: --steps=2000, --data=YOUR.txt, --precision=bf16, --nproc_per_node=4 (see --help)");
}

void train(const Options& o) {
  if (o.threads > 0) set_num_threads(o.threads);
  dist::init_process_group();
  Training(o).run();
  dist::destroy_process_group();
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) {
  int code = 0;
  const auto o = examples::parse_options(argc, argv, code);
  if (!o) return code;
  const std::string ranks = o->nproc_per_node.empty() ? "2" : o->nproc_per_node;
  return examples::run_job("big_model", ranks, o->backend, argc, argv,
                           [&] { examples::train(*o); });
}
