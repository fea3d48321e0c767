#include "examples/support/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

namespace examples {
namespace {

namespace fs = std::filesystem;

// `bazel run` starts programs in a folder of its own and says where the user was.
std::string from_user(const std::string& path) {
  if (path.empty() || fs::path(path).is_absolute()) return path;
  for (const char* variable : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"})
    if (const char* folder = std::getenv(variable))
      return (fs::path(folder) / path).lexically_normal().string();
  return fs::absolute(path).lexically_normal().string();
}

// A finite number, 0 <= x < end. (CLI11's own ranges let nan pass.)
CLI::Validator below(double end = std::numeric_limits<double>::infinity()) {
  const std::string wanted =
      std::isinf(end) ? "a number from 0" : "from 0 to below " + CLI::detail::to_string(end);
  return CLI::Validator(
      [=](std::string& text) {
        double x = 0;
        const bool ok = CLI::detail::lexical_cast(text, x) && x >= 0 && x < end;
        return ok ? std::string() : text + " is not " + wanted;
      },
      "", "");
}

// Why a file cannot be written at that path; empty: it can.
std::string why_not_writable(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  if (fs::is_directory(path)) return "it is a folder";
  if (!fs::is_directory(folder)) return "there is no folder " + folder.string();
  return access(folder.c_str(), W_OK) == 0 ? "" : std::strerror(errno);
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
  run->add_option("--threads", o.threads, "threads a rank")->check(CLI::PositiveNumber);
  run->add_option("--backend", o.backend,
                  "of collectives: auto, shm, gloo, or mpi, which starts the ranks under mpirun")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi"}));
  run->add_option("--seed", o.seed, "of weights, order and dropout")->check(CLI::NonNegativeNumber);
  run->add_option("--strategy", o.strategy,
                  "full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2, no_shard, ddp, or "
                  "none (no wrapper: one rank)")
      ->check(CLI::IsMember({"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2",
                             "no_shard", "ddp", "none"}));
  run->add_option("--shard_group_size", o.shard_group_size,
                  "ranks that share one copy under a hybrid strategy; 0: those of one node")
      ->check(CLI::NonNegativeNumber);
  run->add_option("--backward_prefetch", o.backward_prefetch, "pre, post or none")
      ->check(CLI::IsMember({"pre", "post", "none"}));
  run->add_flag("--cpu_offload", o.cpu_offload, "parameters and optimizer on the host");
  run->add_option("--wrap_min_params", o.wrap_min_params,
                  "0: a unit a block; else the size-based policy")
      ->check(CLI::NonNegativeNumber);
  run->add_option("--precision", o.precision, "fp32, bf16, or fp16 with a scaled loss")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));

  run->add_flag("--nan_check", o.nan_check,
                "look for the first NaN or infinity, and end with the name of its module or "
                "parameter (slow)");

  auto* model = group("Model");
  model->add_option("--preset", o.preset, "laptop or seed")
      ->check(CLI::IsMember({"laptop", "seed"}));
  model->add_option("--layers", o.layers)->check(CLI::NonNegativeNumber);
  model->add_option("--dim", o.dim)->check(CLI::PositiveNumber);
  model->add_option("--ff_dim", o.ff_dim)->check(CLI::PositiveNumber);
  model->add_option("--heads", o.heads)->check(CLI::PositiveNumber);
  model->add_option("--vocab_size", o.vocab_size)->check(CLI::Range(int64_t(1), int64_t(65536)));
  model->add_option("--seq_len", o.seq_len)->check(CLI::PositiveNumber);
  model->add_flag("--causal", o.causal, "mask the future (default true)");
  model->add_flag("--activation_checkpointing", o.activation_checkpointing,
                  "compute blocks again in backward instead of keeping them");

  auto* training = group("Training");
  training->add_option("--batch_size", o.batch_size, "sequences a rank and micro-batch")
      ->check(CLI::PositiveNumber);
  training->add_option("--accumulate", o.accumulate, "micro-batches a step")
      ->check(CLI::PositiveNumber);
  training->add_option("--steps", o.steps)->check(CLI::NonNegativeNumber);
  training->add_option("--lr", o.lr)->check(below());
  training->add_option("--min_lr", o.min_lr, "at the end of the cosine")->check(below());
  training->add_option("--beta1", o.beta1)->check(below(1));
  training->add_option("--beta2", o.beta2)->check(below(1));
  training->add_option("--weight_decay", o.weight_decay)->check(below());
  training->add_option("--max_norm", o.max_norm, "of gradients; 0: no clipping")->check(below());
  training->add_option("--warmup_steps", o.warmup_steps)->check(CLI::NonNegativeNumber);
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
      ->check(CLI::Range(int64_t(0), int64_t(65535)));
  data->add_flag("--shuffle", o.shuffle, "(default true)");
  data->add_option("--eval_interval", o.eval_interval, "steps; 0: never")
      ->check(CLI::NonNegativeNumber);

  auto* sample = group("Sample");
  sample->add_option("--prompt", o.prompt);
  sample->add_option("--max_new_tokens", o.max_new_tokens, "0: no sample")
      ->check(CLI::NonNegativeNumber);
  sample->add_option("--temperature", o.temperature, "0: the likeliest token")->check(below());
  sample->add_option("--top_k", o.top_k, "0: all tokens")->check(CLI::NonNegativeNumber);

  auto* files = group("Files");
  files->add_option("--checkpoint_dir", o.checkpoint_dir);
  files->add_option("--save_interval", o.save_interval, "steps; 0: nothing is saved")
      ->check(CLI::NonNegativeNumber);
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

  // CLI11 takes the argument after "--prompt=" for its value; so it gets an empty one.
  std::vector<std::string> reversed;
  for (int i = argc - 1; i >= 1; --i) {
    std::string a = argv[i];
    if (a.starts_with("--") && a.ends_with('=')) {
      reversed.push_back("");
      a.pop_back();
    }
    reversed.push_back(a);
  }
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    exit_code = 0;
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    std::string text = e.what();
    for (char& c : text)
      if (c == '\n') c = ' ';
    std::fprintf(stderr, "big_model: %s (see --help)\n", text.c_str());
    exit_code = 2;
    return std::nullopt;
  }
  auto refuse = [&](const std::string& text) {
    std::fprintf(stderr, "big_model: %s (see --help)\n", text.c_str());
    exit_code = 2;
    return std::nullopt;
  };
  if (o.dim % o.heads != 0)
    return refuse("--dim=" + std::to_string(o.dim) +
                  " must be a multiple of --heads=" + std::to_string(o.heads));
  if (o.async_save && o.checkpoint_format == "full")
    return refuse("--async_save needs --checkpoint_format=sharded: a full one goes through rank 0");
  if (o.shard_group_size > 0 && !o.strategy.starts_with("hybrid_shard"))
    return refuse("--shard_group_size goes with --strategy=hybrid_shard or hybrid_shard_zero2");
  if (o.resume && o.overwrite) return refuse("--resume and --overwrite exclude each other");
  for (auto* list : {&o.data, &o.val_data})
    for (auto& p : *list) {
      p = from_user(p);
      if (!fs::exists(p)) return refuse("there is no file or folder " + p);
    }
  for (auto* p : {&o.checkpoint_dir, &o.init_from, &o.save_weights, &o.log_jsonl})
    *p = from_user(*p);
  if (!o.init_from.empty() && !fs::exists(o.init_from))
    return refuse("there is no file or folder " + o.init_from);
  // Now, and not after hours of training.
  for (auto& [flag, path] :
       {std::pair{"--log_jsonl", o.log_jsonl}, {"--save_weights", o.save_weights}})
    if (const std::string why = path.empty() ? "" : why_not_writable(path); !why.empty())
      return refuse(std::string("cannot write ") + flag + "=" + path + ": " + why);
  if (fs::exists(o.checkpoint_dir) && !fs::is_directory(o.checkpoint_dir))
    return refuse("--checkpoint_dir=" + o.checkpoint_dir + " is not a folder");
  return o;
}

}  // namespace examples
