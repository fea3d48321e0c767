// Runs of the big_model program, as a user starts it.
//
//     const std::string folder = sherd::dist::new_folder();
//     sherd::dist::Result r =
//         big_model(small_run(2) + Flags{"--strategy=ddp", "--log_jsonl=" + folder + "/log"});
//     EXPECT_EQ(r.exit_code, 0) << r.err;
//     for (const nlohmann::json& line : read_log(folder + "/log")) ...
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/launcher/program.h"

namespace examples {

using Flags = std::vector<std::string>;
Flags operator+(Flags a, const Flags& b);

inline const char* const kBigModel = "examples/big_model";
inline const char* const kGoldens = "tests/goldens/";

// The run that a golden folder describes, at that number of ranks. Of flags given twice the last
// counts.
Flags golden_flags(const std::string& name, int ranks);
// Twenty steps of a few milliseconds, of sizes that nothing divides, with nothing evaluated,
// sampled or saved.
Flags small_run(int ranks);
// The flags but those that say where the data are.
Flags without_data(const Flags& flags);
nlohmann::json golden_trace(const std::string& name);

// The command, with a cache folder of the test's own and a thread a rank.
sherd::dist::ProgramOptions big_model_environment(const sherd::dist::ProgramOptions& options = {});
std::vector<std::string> big_model_command(const Flags& flags);
sherd::dist::Result big_model(const Flags& flags, const sherd::dist::ProgramOptions& options = {});

std::vector<nlohmann::json> read_log(const std::string& path);
// The lines that have this field.
std::vector<nlohmann::json> lines_with(const std::vector<nlohmann::json>& log, const char* field);

}  // namespace examples
