#include "examples/support/report.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "distributed/job_environment.h"
#include "examples/support/run_lock.h"

namespace examples {
namespace {

using Clock = std::chrono::steady_clock;

std::string format(const char* f, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, f, values...);
  return text;
}

std::string duration(double seconds) {
  const int64_t s = int64_t(seconds + 0.5);
  return s < 3600 ? format("%d:%02d", int(s / 60), int(s % 60))
                  : format("%d:%02d:%02d", int(s / 3600), int(s / 60 % 60), int(s % 60));
}

// In bytes; 0: there is none. -1, with errno: it cannot be read.
int64_t end_of_last_line(int fd) {
  std::string block(1 << 16, '\0');
  for (off_t end = ::lseek(fd, 0, SEEK_END); end != 0;) {
    const off_t begin = std::max<off_t>(0, end - off_t(block.size()));
    const ssize_t read = end < 0 ? -1 : ::pread(fd, block.data(), size_t(end - begin), begin);
    if (read != end - begin) return -1;
    const size_t at = std::string_view(block.data(), size_t(read)).rfind('\n');
    if (at != std::string_view::npos) return begin + off_t(at) + 1;
    end = begin;
  }
  return 0;
}

// mpirun may give ranks a terminal of its own, and writes what they redraw into a log as it is.
bool is_on_terminal() {
  return isatty(1) && sherd::dist::starter() != sherd::dist::Starter::kMpirun;
}

}  // namespace

Reporter::Reporter(bool active, const std::string& log_path)
    : active_(active),
      terminal_(is_on_terminal()),
      log_path_(log_path),
      start_(Clock::now()),
      last_line_(start_ - std::chrono::hours(1)) {
  if (!active_ || log_path.empty()) return;
  // Emptied only when it is ours, and the run begins.
  const int fd = ::open(log_path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  log_ = fd < 0 ? nullptr : ::fdopen(fd, "a");
  if (!log_) sherd::fail("cannot write --log_jsonl=", log_path, ": ", std::strerror(errno));
  struct stat info;
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode))
    lock_for_process(fd, "--log_jsonl=" + log_path);
}

Reporter::~Reporter() {
  end_line();
  if (log_) std::fclose(log_);
}

void Reporter::begin(const nlohmann::json& config, bool goes_on) {
  struct stat info;
  if (log_ && ::fstat(::fileno(log_), &info) == 0 && S_ISREG(info.st_mode)) {
    // What a full disk cut short is no line.
    const off_t kept = goes_on ? end_of_last_line(::fileno(log_)) : 0;
    if (kept < 0 || ::ftruncate(::fileno(log_), kept) != 0)
      sherd::fail("cannot write --log_jsonl=", log_path_, ": ", std::strerror(errno));
  }
  write({{"config", config}});
}

void Reporter::write(const nlohmann::json& object) {
  if (!log_) return;
  const std::string line = object.dump() + "\n";
  if (std::fwrite(line.data(), 1, line.size(), log_) != line.size() || std::fflush(log_) != 0)
    sherd::fail("cannot write --log_jsonl=", log_path_, ": ", std::strerror(errno));
}

void Reporter::end_line() {
  if (open_line_) std::fputc('\n', stdout);
  open_line_ = false;
  std::fflush(stdout);
}

void Reporter::say(const std::string& line) {
  if (!active_) return;
  end_line();
  const std::string text = line + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);  // a NUL does not end it
  std::fflush(stdout);
}

void Reporter::step(const StepReport& r) {
  if (!active_) return;
  nlohmann::json j = {{"step", r.step},
                      {"loss", r.loss},
                      {"grad_norm", r.grad_norm},
                      {"lr", r.lr},
                      {"tokens_per_s", r.tokens_per_s},
                      {"step_ms", r.step_ms},
                      {"peak_mem_mib", r.peak_mem_mib},
                      {"comm_bytes", r.comm_bytes},
                      {"exposed_ms", r.exposed_ms}};
  j.update(r.extra);
  write(j);
  const auto now = Clock::now();
  if (first_step_ < 0)
    first_step_ = r.step - 1, start_ = now - std::chrono::milliseconds(int64_t(r.step_ms));
  const bool last = r.step == r.steps;
  if (!terminal_ && !last && r.step != 1 && now - last_line_ < std::chrono::seconds(10)) return;
  last_line_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double eta = elapsed / double(r.step - first_step_) * double(r.steps - r.step);
  const std::string comm =
      r.comm_bytes == 0 ? ""
                        : format("  exchanged %.0f MiB, %.1f%% exposed",
                                 double(r.comm_bytes) / (1 << 20), 100 * r.exposed_ms / r.step_ms);
  const std::string line =
      format("step %lld/%lld  loss %.4f  %.0f tokens/s  %.0f%% of peak  %.0f MiB a rank%s  ETA %s",
             (long long)r.step, (long long)r.steps, r.loss, r.tokens_per_s, 100 * r.flops_share,
             r.peak_mem_mib, comm.c_str(), duration(eta).c_str());
  if (terminal_) {
    std::fputs(("\r" + line + "\033[K").c_str(), stdout);
    open_line_ = true;
  } else {
    std::fputs((line + "\n").c_str(), stdout);
  }
  std::fflush(stdout);
}

void Reporter::validation(int64_t step, double loss, double bits_per_byte) {
  if (!active_) return;
  nlohmann::json j = {{"step", step}, {"val_loss", loss}};
  if (bits_per_byte > 0) j["val_bits_per_byte"] = bits_per_byte;
  write(j);
  say(bits_per_byte > 0 ? format("step %lld  validation loss %.4f  %.3f bits a byte",
                                 (long long)step, loss, bits_per_byte)
                        : format("step %lld  validation loss %.4f", (long long)step, loss));
}

}  // namespace examples
