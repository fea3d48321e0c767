// What a training run tells: one updating line on a terminal or a line now and then in a log, and a
// JSON line a step.
#pragma once
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

namespace examples {

struct StepReport {
  int64_t step = 0, steps = 0;
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, step_ms = 0, peak_mem_mib = 0,
         flops_share = 0;
  int64_t comm_bytes = 0;  // payload of all collectives of the step, of one rank
  double exposed_ms = 0;   // that this rank stood waiting for them
  nlohmann::json extra;    // collectives by kind
};

// On rank 0; elsewhere everything does nothing.
class Reporter {
 public:
  // log_path empty: no file. Error if it cannot be written, or another process writes it.
  Reporter(bool active, const std::string& log_path);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  // The log's first line, or, where a run goes on, the first of its new ones. Error, as for all
  // lines, if the disk is full.
  void begin(const nlohmann::json& config, bool goes_on);
  void step(const StepReport& r);
  void validation(int64_t step, double loss, double bits_per_byte);  // bits_per_byte 0: not known
  void say(const std::string& line);                                 // a line of its own

 private:
  void write(const nlohmann::json& object);
  void end_line();

  bool active_, terminal_;
  std::string log_path_;
  std::FILE* log_ = nullptr;
  bool open_line_ = false;
  std::chrono::steady_clock::time_point start_, last_line_;
  int64_t first_step_ = -1;
};

}  // namespace examples
