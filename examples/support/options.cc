#include "examples/support/options.h"

#include <algorithm>
#include <cstdio>

#include "cli/command_line.h"
#include "cli/kept_tokenizer.h"
#include "cli/paths.h"
#include "core/error.h"
#include "data/tokenizer.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "examples/support/corpus.h"

namespace examples {

using namespace sherd;
using namespace sherd::cli;

bool is_of_tokens(const std::vector<std::string>& paths) {
  return !paths.empty() && std::ranges::all_of(paths, [](auto& p) { return p.ends_with(".bin"); });
}

namespace {

// Limits that no machine reaches, and below which no product of two overflows.
constexpr int64_t kMostWidth = 1 << 24, kMostLayers = 1 << 16, kMostBatch = 1 << 20;
constexpr int kMostThreads = 1024;
constexpr double kMostParameters = 1e13;

void check_model(const Options& o) {
  if (o.dim % o.heads != 0) fail("--dim=", o.dim, " must be a multiple of --heads=", o.heads);
  const double block = 4.0 * double(o.dim) * double(o.dim) + 2.0 * double(o.dim) * double(o.ff_dim),
               parameters = double(o.layers) * block + 2.0 * double(o.vocab_size) * double(o.dim);
  if (parameters > kMostParameters) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "a model of %.1e parameters is too large: at most %.0e; make --dim, --ff_dim or "
                  "--layers smaller",
                  parameters, kMostParameters);
    fail(text);
  }
}

// What is written damages no checkpoint, and is not taken for text at the next start.
void need_place(const std::string& flag, const std::string& path, const Options& o) {
  if (path.empty()) return;
  try {
    dist::need_outside_of_checkpoints(path);
  } catch (const Error& e) {
    fail(flag, "=", e.what());
  }
  const std::filesystem::path name = std::filesystem::path(path).filename();
  if (!o.checkpoint_dir.empty() && lies_in(path, o.checkpoint_dir) &&
      (name == ".run-lock" || name.string().starts_with("step-")))
    fail(flag, "=", path, " is a name that --checkpoint_dir=", o.checkpoint_dir, " has for itself");
  for (auto [data, list] : {std::pair{"--data", &o.data}, {"--val_data", &o.val_data}})
    for (const std::string& folder : *list)
      if (std::filesystem::is_directory(folder) && lies_in(path, folder))
        fail(flag, "=", path, " would lie in ", data, "=", folder,
             ", and be read as text next time: take a place outside of it");
}

// Paths become absolute. Now, and not after hours of training: what is read is there, what will be
// written can be.
void check_paths(Options& o) {
  std::vector<NamedPath> inputs;
  for (auto [flag, list] : {std::pair{"--data", &o.data}, {"--val_data", &o.val_data}})
    for (auto& p : *list) {
      p = from_user(p);
      inputs.push_back({flag, p});
    }
  for (auto* p : {&o.checkpoint_dir, &o.init_from, &o.save_weights, &o.log_jsonl})
    *p = from_user(*p);
  inputs.push_back({"--init_from", o.init_from});
  for (auto& [flag, path] : inputs) need_input(flag, path);
  // A run's folder stands for its last checkpoint.
  if (std::filesystem::is_directory(o.init_from))
    if (const auto steps = dist::checkpoint_steps(o.init_from); !steps.empty())
      o.init_from += "/" + dist::checkpoint_name(steps.back());
  need_log("--log_jsonl", o.log_jsonl);
  need_output_file("--save_weights", o.save_weights);
  if (o.save_interval > 0) need_folder("--checkpoint_dir", o.checkpoint_dir);
  const std::vector<NamedPath> outputs = {{"--log_jsonl", o.log_jsonl},
                                          {"--save_weights", o.save_weights}};
  std::vector<NamedPath> files = outputs;
  const auto add_tokenizer = [&](const std::string& whose, const std::string& path) {
    need_output_file(whose, path);
    cli::need_tokenizer_place(whose, path);
    files.push_back({"the tokenizer of " + whose, path});
  };
  if (!o.save_weights.empty())
    add_tokenizer("--save_weights", cli::tokenizer_of_weights(o.save_weights));
  if (o.save_interval > 0 && std::filesystem::is_directory(o.checkpoint_dir))
    add_tokenizer("--checkpoint_dir", cli::tokenizer_of_run(o.checkpoint_dir));
  need_different(inputs, files);
  need_safetensors_name("--save_weights", o.save_weights);
  for (auto& [flag, path] : outputs) need_place(flag, path, o);
  need_place("--checkpoint_dir", o.checkpoint_dir.empty() ? "" : o.checkpoint_dir + "/state.json",
             o);
  if (o.overwrite && o.save_interval == 0)
    fail("--overwrite removes checkpoints, and with --save_interval=0 none takes their place");
  if (o.overwrite && !o.init_from.empty() && !o.checkpoint_dir.empty() &&
      !dist::checkpoint_around(o.init_from + "/state.json").empty() &&
      lies_in(o.init_from, o.checkpoint_dir))
    fail("--overwrite would remove --init_from=", o.init_from,
         ", which lies in --checkpoint_dir=", o.checkpoint_dir);
}

void check(Options& o) {
  check_model(o);
  if (o.min_lr > o.lr)
    fail("--min_lr=", CLI::detail::to_string(o.min_lr),
         " is above --lr=", CLI::detail::to_string(o.lr), ": the learning rate would rise");
  if (o.async_save && o.checkpoint_format == "full")
    fail("--async_save needs --checkpoint_format=sharded: a full one goes through rank 0");
  if (o.shard_group_size > 0 && !o.strategy.starts_with("hybrid_shard"))
    fail("--shard_group_size goes with --strategy=hybrid_shard or hybrid_shard_zero2");
  if (o.pack_documents && is_of_tokens(o.data) && o.end_id >= o.vocab_size)
    fail("--end_id=", o.end_id, " is no token of --vocab_size=", o.vocab_size,
         ": no document would end");
  if (o.resume && o.overwrite) fail("--resume and --overwrite exclude each other");
  check_paths(o);
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, int& exit_code) {
  Options o;
  // The preset sets defaults, so it is looked for first.
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a.starts_with("--preset=")) o.preset = a.substr(9);
    if (a == "--preset" && i + 1 < argc) o.preset = argv[i + 1];
  }
  if (o.preset == "seed") {
    o.layers = 48, o.dim = 2048, o.ff_dim = 8192, o.vocab_size = 50000, o.heads = 8;
    o.wrap_min_params = 1'000'000;
  }

  CLI::App app{"Trains BigModel, fully sharded, on text."};
  app.get_formatter()->column_width(38);
  // The last of several wins, so that a script's flags can be followed by a user's.
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  auto group = [&](const char* title) { return app.add_option_group(title); };

  auto* run = group("How it runs");
  run->add_option("--nproc_per_node", o.nproc_per_node,
                  "ranks on this machine: a number, auto or cpu (default 2)")
      ->check([](const std::string& n) { return n.empty() ? "--nproc_per_node is empty" : ""; });
  run->add_option("--threads", o.threads,
                  "threads a rank; 0: OMP_NUM_THREADS, or the cores divided among the ranks")
      ->transform(whole_number(0, kMostThreads));
  run->add_option("--backend", o.backend,
                  "of collectives: auto, shm, gloo, or mpi, which starts the ranks under mpirun")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi"}));
  run->add_option("--seed", o.seed, "of weights, order and dropout")
      ->transform(whole_number(0, std::numeric_limits<int64_t>::max()));
  run->add_option("--strategy", o.strategy,
                  "full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2, no_shard, ddp, or "
                  "none (no wrapper: one rank)")
      ->check(CLI::IsMember({"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2",
                             "no_shard", "ddp", "none"}));
  run->add_option("--shard_group_size", o.shard_group_size,
                  "ranks that share one copy under a hybrid strategy; 0: those of one node")
      ->transform(whole_number(0, 1 << 20));
  run->add_option("--backward_prefetch", o.backward_prefetch, "pre, post or none")
      ->check(CLI::IsMember({"pre", "post", "none"}));
  run->add_flag("--cpu_offload", o.cpu_offload, "parameters and optimizer on the host");
  run->add_option("--wrap_min_params", o.wrap_min_params,
                  "0: a unit a block; else the size-based policy")
      ->transform(whole_number(0));
  run->add_option("--precision", o.precision, "fp32, bf16, or fp16 with a scaled loss")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));

  run->add_flag("--nan_check", o.nan_check,
                "look for the first NaN or infinity, and end with the name of its module or "
                "parameter (slow)");

  auto* model = group("Model");
  model
      ->add_option("--preset", o.preset,
                   "laptop: small, trains in minutes; seed: 48 layers, 2.6e9 parameters and a "
                   "vocabulary of 50000, for which the default text is too short (give --data)")
      ->check(CLI::IsMember({"laptop", "seed"}));
  model->add_option("--layers", o.layers, "blocks of attention and feed-forward")
      ->transform(whole_number(0, kMostLayers));
  model->add_option("--dim", o.dim, "width of the model, a multiple of --heads")
      ->transform(whole_number(1, kMostWidth));
  model->add_option("--ff_dim", o.ff_dim, "width within a block's feed-forward part")
      ->transform(whole_number(1, kMostWidth));
  model->add_option("--heads", o.heads, "of a block's attention")
      ->transform(whole_number(1, kMostWidth));
  auto* vocab_size = model->add_option("--vocab_size", o.vocab_size, "256 with --tokenizer=bytes")
                         ->transform(whole_number(1, 65536));
  model->add_option("--seq_len", o.seq_len, "tokens a sample, and seen at most in sampling")
      ->transform(whole_number(1, kMostWidth));
  model->add_flag("--causal", o.causal,
                  "a token sees none behind it (default true; without, the model sees its labels)");
  model->add_flag("--activation_checkpointing", o.activation_checkpointing,
                  "compute blocks again in backward instead of keeping them");

  auto* training = group("Training");
  training->add_option("--batch_size", o.batch_size, "sequences a rank and micro-batch")
      ->transform(whole_number(1, kMostBatch));
  training->add_option("--accumulate", o.accumulate, "micro-batches a step")
      ->transform(whole_number(1));
  training->add_option("--steps", o.steps, "of the optimizer, in all")->transform(whole_number(0));
  training->add_option("--lr", o.lr, "the highest, after the warm-up")->check(number());
  auto* min_lr = training
                     ->add_option("--min_lr", o.min_lr,
                                  "at the end of the cosine; --lr, if that is below the default")
                     ->check(number());
  training->add_option("--beta1", o.beta1)->check(number(0, 1));
  training->add_option("--beta2", o.beta2)->check(number(0, 1));
  training->add_option("--weight_decay", o.weight_decay)->check(number());
  training->add_option("--max_norm", o.max_norm, "of gradients; 0: no clipping")->check(number());
  training->add_option("--warmup_steps", o.warmup_steps)->transform(whole_number(0));
  training->add_option("--schedule", o.schedule, "cosine or constant")
      ->check(CLI::IsMember({"cosine", "constant"}));

  auto* data = group("Data");
  data->add_option("--data", o.data, "text file, folder, or .bin of uint16 tokens; several allowed")
      ->take_all();
  data->add_option("--val_data", o.val_data, "validation data of the same kind")->take_all();
  data->add_option("--tokenizer", o.tokenizer, "bytes or bpe")
      ->check(CLI::IsMember({"bytes", "bpe"}));
  data->add_flag("--pack_documents", o.pack_documents,
                 "several documents a sequence, none of which sees another: lines of text, or what "
                 "ends with --end_id in token files");
  data->add_option("--end_id", o.end_id, "token that ends a document of a .bin file")
      ->transform(whole_number(0, 65535));
  data->add_flag("--shuffle", o.shuffle,
                 "in another order each epoch (default true; --shuffle=false)");
  data->add_option("--eval_interval", o.eval_interval, "steps; 0: never")
      ->transform(whole_number(0));

  auto* sample = group("Sample");
  sample->add_option("--prompt", o.prompt, "what the sample begins with");
  sample->add_option("--max_new_tokens", o.max_new_tokens, "0: no sample")
      ->transform(whole_number(0));
  sample->add_option("--temperature", o.temperature, "0: the likeliest token")->check(number());
  sample->add_option("--top_k", o.top_k, "0: all tokens")->transform(whole_number(0));

  auto* files = group("Files");
  files->add_option(
      "--checkpoint_dir", o.checkpoint_dir,
      "where the last two checkpoints are kept; else a new folder in the user's cache");
  files->add_option("--save_interval", o.save_interval, "steps; 0: nothing is saved")
      ->transform(whole_number(0));
  files
      ->add_option("--checkpoint_format", o.checkpoint_format,
                   "sharded: a file a rank; full: model.safetensors, written by rank 0")
      ->check(CLI::IsMember({"sharded", "full"}));
  files->add_flag("--async_save", o.async_save, "train on while a checkpoint is written");
  files->add_flag("--resume", o.resume, "go on from the last checkpoint");
  files->add_flag("--overwrite", o.overwrite, "start afresh in a folder that holds checkpoints");
  files->add_option("--init_from", o.init_from,
                    "start from these weights: a .safetensors file, or a checkpoint's folder");
  files->add_option("--save_weights", o.save_weights,
                    "write the weights here at the end (.safetensors)");
  files->add_option("--log_jsonl", o.log_jsonl, "one JSON object a step");

  try {
    if (const auto code = cli::parse(app, "big_model", argc, argv)) {
      exit_code = *code;
      return std::nullopt;
    }
    if (min_lr->count() == 0) o.min_lr = std::min(o.min_lr, o.lr);
    o.is_vocab_size_given = vocab_size->count() > 0;
    if (o.tokenizer == "bytes" && !o.is_vocab_size_given) o.vocab_size = 256;
    check(o);
    return o;
  } catch (const std::exception& e) {
    exit_code = refuse("big_model", e.what());
    return std::nullopt;
  }
}

}  // namespace examples
