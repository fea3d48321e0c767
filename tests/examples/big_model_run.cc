#include "tests/examples/big_model_run.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace examples {

using sherd::concat;
namespace dist = sherd::dist;

Flags operator+(Flags a, const Flags& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Flags golden_flags(const std::string& name, int ranks) {
  const nlohmann::json c = golden_trace(name)["config"];
  const std::string folder = kGoldens + name;
  Flags flags{"--nproc_per_node=" + std::to_string(ranks),
              concat("--batch_size=", c["batch"].get<int>() / ranks),
              "--schedule=constant",
              "--warmup_steps=0",
              "--data=" + folder + "/tokens.bin",
              "--shuffle=false",
              "--eval_interval=0",
              "--save_interval=0",
              "--max_new_tokens=0"};
  for (auto [flag, key] : {std::pair{"layers", "layers"},
                           {"dim", "dim"},
                           {"ff_dim", "ff_dim"},
                           {"heads", "heads"},
                           {"vocab_size", "vocab"},
                           {"seq_len", "seq"},
                           {"causal", "causal"},
                           {"accumulate", "accumulate"},
                           {"steps", "steps"},
                           {"lr", "lr"},
                           {"weight_decay", "weight_decay"},
                           {"max_norm", "max_norm"}})
    flags.push_back(concat("--", flag, "=", c[key].dump()));
  return flags;
}

Flags small_run(int ranks) {
  return golden_flags("bigmodel_odd", ranks) + Flags{"--accumulate=1", "--steps=20"};
}

Flags without_data(const Flags& flags) {
  Flags rest = flags;
  std::erase_if(rest, [](const std::string& f) { return f.starts_with("--data="); });
  return rest;
}

nlohmann::json golden_trace(const std::string& name) {
  return nlohmann::json::parse(dist::read_file(kGoldens + name + "/trace.json"));
}

std::vector<std::string> big_model_command(const Flags& flags) { return Flags{kBigModel} + flags; }

dist::ProgramOptions big_model_environment(const dist::ProgramOptions& options) {
  dist::ProgramOptions o = options;
  for (auto& [name, value] :
       std::map<std::string, std::string>{{"XDG_CACHE_HOME", testing::TempDir() + "cache"},
                                          {"OMP_NUM_THREADS", "1"},
                                          {"BUILD_WORKING_DIRECTORY", ""}})
    o.environment.emplace(name, value);
  return o;
}

dist::Result big_model(const Flags& flags, const dist::ProgramOptions& options) {
  return dist::run(big_model_command(flags), big_model_environment(options));
}

std::vector<nlohmann::json> read_log(const std::string& path) {
  std::vector<nlohmann::json> lines;
  for (const std::string& line : dist::lines_of(dist::read_file(path)))
    lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<nlohmann::json> lines_with(const std::vector<nlohmann::json>& log, const char* field) {
  std::vector<nlohmann::json> found;
  for (auto& line : log)
    if (line.contains(field)) found.push_back(line);
  return found;
}

}  // namespace examples
