// The flags of big_model.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace examples {

struct Options {
  // ---- how it runs
  std::string nproc_per_node =
      "";                    // empty: 2 on this machine, unless a launcher started this process
  int threads = 0;           // a rank's; 0: OMP_NUM_THREADS, or cores / ranks
  std::string backend = "";  // of collectives; empty: SHERD_BACKEND, or auto
  int64_t seed = 0;
  std::string strategy = "full_shard";
  int shard_group_size = 0;  // of the hybrid strategies; 0: the ranks of one node
  std::string backward_prefetch = "pre";
  bool cpu_offload = false;
  int64_t wrap_min_params = 0;  // 0: a unit a block
  std::string precision = "fp32";
  bool nan_check = false;
  // ---- the model
  std::string preset = "laptop";
  int64_t layers = 4, dim = 256, ff_dim = 1024, heads = 8, vocab_size = 2048, seq_len = 128;
  bool is_vocab_size_given = false;  // and no preset's
  bool causal = true;
  bool activation_checkpointing = false;
  // ---- training
  int64_t batch_size = 8;  // sequences a rank and micro-batch
  int64_t accumulate = 1, steps = 400;
  double lr = 1e-3, min_lr = 1e-4, beta1 = 0.9, beta2 = 0.999, weight_decay = 0.01, max_norm = 1.0;
  int64_t warmup_steps = 40;
  std::string schedule = "cosine";
  // ---- data
  std::vector<std::string> data, val_data;
  std::string tokenizer = "bpe";
  bool pack_documents = false;
  int64_t end_id = 0;  // of a document in token files
  bool shuffle = true;
  int64_t eval_interval = 100;
  // ---- sampling
  std::string prompt = "In the beginning";
  int64_t max_new_tokens = 120;
  double temperature = 0.8;
  int64_t top_k = 40;
  // ---- files
  std::string checkpoint_dir = "";  // empty: one of this run in the cache folder, if it saves
  int64_t save_interval = 200;
  std::string checkpoint_format = "sharded";
  bool async_save = false, resume = false, overwrite = false;
  std::string init_from, save_weights, log_jsonl;
};

// Are these token files (.bin), and not text?
bool is_of_tokens(const std::vector<std::string>& paths);

// Parses the command line. Relative paths become absolute, from where the user stands. On --help
// prints the flags and returns nothing with code 0; on a mistake prints one line and returns
// nothing with code 2.
std::optional<Options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace examples
