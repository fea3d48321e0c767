#include "distributed/launcher/job.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "distributed/fd.h"
#include "distributed/launcher/process.h"

namespace sherd::dist {
namespace {

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

using std::chrono::milliseconds;

// [Note: held lines] A line of stderr waits so long before it is written, so that what several
// ranks say alike just before they fail can be shown once. A rank that fails keeps its held lines
// until the job has settled; show_last_words() then writes them, rank by rank.
constexpr milliseconds kHold{200};
constexpr size_t kMaxHeld = 32;  // no more than ErrorTail keeps

// All ranks make the same usage error, but on a busy machine not in the same 300 ms.
constexpr milliseconds kUsageSettle{1000};

// After an interrupt, a reader who does not read is not waited for any longer.
constexpr milliseconds kLastWrites{1000};

constexpr size_t kRead = 1 << 16;
constexpr size_t kPipe = 1 << 20;  // no pipe holds more

constexpr size_t kMaxQueued = 1 << 18;  // then ranks that print must wait for the reader

// What this process reads does not block; what the rank writes does.
void make_pipe(Fd& from, Fd& to) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("[launch] cannot make a pipe: ", strerror(errno));
  from = Fd(ends[0]);
  to = Fd(ends[1]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

}  // namespace

Job::Job(const LaunchOptions& options, std::string path, std::vector<std::string> argv,
         const SignalGuard& signals, JobHooks hooks)
    : options_(options),
      path_(std::move(path)),
      argv_(std::move(argv)),
      signals_(signals),
      hooks_(std::move(hooks)),
      children_before_(child_processes()) {}

Job::~Job() {
  signal_groups(SIGKILL);
  for (Rank& rank : ranks_) {
    waitpid(rank.pid, nullptr, 0);
    for (Stream* stream : {&rank.out, &rank.err}) {
      for (int fd : {stream->from, stream->log})
        if (fd >= 0) close(fd);
    }
  }
}

void Job::start(RankSpec spec) {
  Rank rank{.rank = spec.rank, .local_rank = spec.local_rank, .log_path = spec.log_path};
  ProcessSpec process{.path = path_, .argv = argv_, .environment = spec.environment};
  process.inherited = spec.store_fd;
  process.signal_mask = signals_.mask_before();

  Fd null, out_from, out_to, err_from, err_to;
  // A rank that reads a terminal from outside its foreground group would be stopped.
  if (spec.local_rank != 0 || isatty(0)) {
    null = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (null.fd() < 0) fail("[launch] cannot open /dev/null: ", strerror(errno));
    process.in = null.fd();
  }
  const bool is_logged = spec.log[0].fd() >= 0 || spec.log[1].fd() >= 0;
  const bool is_alone = options_.nproc_per_node == 1 && options_.nnodes == 1 && !is_logged;
  const bool is_voice = options_.output == LaunchOutput::kProgram && spec.local_rank == 0;
  if (!is_alone && !is_voice) {
    make_pipe(out_from, out_to);
    process.out = out_to.fd();
  }
  if (!is_alone) {
    make_pipe(err_from, err_to);
    process.err = err_to.fd();
    rank.is_raw = is_voice;
    redraws_ |= is_voice && isatty(1);
  }
  rank.pid = start_process(process);
  rank.out.from = out_from.take();
  rank.err.from = err_from.take();
  for (Stream* stream : {&rank.out, &rank.err}) {
    stream->log = spec.log[stream->to - 1].take();
    stream->is_shown = spec.is_shown[stream->to - 1];
  }
  ranks_.push_back(std::move(rank));
}

bool Job::is_interrupted() {
  for (int signal = signals_.take(); signal != 0; signal = signals_.take()) {
    if (signal == SIGTSTP)
      suspend();
    else if (signal != SIGCHLD)  // run() will look for ranks that have ended
      interrupt(signal);
  }
  return interrupted_by_ != 0;
}

void Job::run() {
  take_signals();  // is_interrupted() may have taken SIGCHLD
  while (!is_gone()) step();
  for (Rank& rank : ranks_) {
    finish_streams(rank);
    release_held(rank);
  }
}

void Job::flush() {
  const Clock::time_point give_up = Clock::now() + kLastWrites;
  while (!output_.empty() && (interrupted_by_ == 0 || Clock::now() < give_up)) step();
}

void Job::step() {
  std::vector<pollfd> fds{
      {signals_.fd(), POLLIN, 0}, {-1, POLLOUT, 0}, {all_ended() ? -1 : hooks_.fd, POLLIN, 0}};
  const size_t first_source = fds.size();
  std::vector<std::pair<Rank*, Stream*>> sources;
  if (!output_.empty()) fds[1].fd = output_.fd();
  if (output_.bytes() < kMaxQueued) {
    for (Rank& rank : ranks_) {
      for (Stream* stream : {&rank.out, &rank.err}) {
        if (stream->from < 0) continue;
        fds.push_back({stream->from, POLLIN, 0});
        sources.emplace_back(&rank, stream);
      }
    }
  }
  poll(fds.data(), fds.size(), poll_timeout());
  if (fds[1].revents != 0) output_.write_some();
  for (size_t i = 0; i < sources.size(); ++i) {
    if (fds[i + first_source].revents != 0)
      read_stream(*sources[i].first, *sources[i].second, kRead);
  }
  if (fds[0].revents != 0) take_signals();
  if (fds[2].revents != 0 && hooks_.is_over() && phase_ < Phase::kStopping) stop_ranks();
  if (output_.is_broken(1) && phase_ < Phase::kStopping) interrupt(SIGPIPE);  // as in `job | head`
  // A full disk does not end the job.
  if (const int reason = output_.lost(1); reason && !std::exchange(has_lost_output_, true))
    say(concat("sherdrun: warning: stdout cannot be written: ", strerror(reason),
               "; the job goes on, and what it says meanwhile is lost"));
  keep_time();
}

int Job::poll_timeout() const {
  Clock::time_point next = Clock::time_point::max();
  if (phase_ == Phase::kSettling) next = std::min(next, settled_at());
  if (phase_ == Phase::kStopping) next = std::min(next, stop_until_);
  for (const Rank& rank : ranks_) {
    if (!rank.held.empty() && !rank.failed) next = std::min(next, rank.held_since + kHold);
  }
  if (interrupted_by_ != 0) next = std::min(next, Clock::now() + kHold);  // see kLastWrites
  if (next == Clock::time_point::max()) return -1;
  const std::chrono::duration<double, std::milli> left = next - Clock::now();
  return static_cast<int>(std::max(0.0, std::ceil(left.count())));
}

void Job::keep_time() {
  const Clock::time_point now = Clock::now();
  for (Rank& rank : ranks_) {
    if (!rank.held.empty() && !rank.failed && now >= rank.held_since + kHold) release_held(rank);
  }
  if (phase_ == Phase::kSettling && now >= settled_at()) stop_ranks();
  if (phase_ == Phase::kStopping && now >= stop_until_) kill_ranks();
}

// ---- what ranks say

void Job::read_stream(Rank& rank, Stream& stream, size_t most) {
  static thread_local char buffer[kRead];
  for (size_t done = 0; stream.from >= 0 && done < most;) {
    const ssize_t n = read(stream.from, buffer, sizeof buffer);
    if (n < 0) return;  // nothing more now
    const std::string_view bytes(buffer, static_cast<size_t>(n));
    const auto line = [&](std::string_view text) { take_line(rank, stream.to, text); };
    if (n == 0) {
      close(std::exchange(stream.from, -1));
      stream.splitter.finish(line);
      return;
    }
    if (stream.log >= 0 && !write_all(stream.log, bytes)) {
      // A full disk does not end the job.
      const int reason = errno;
      close(std::exchange(stream.log, -1));
      if (!std::exchange(has_lost_log_, true))
        say(concat("sherdrun: warning: the log of rank ", rank.rank,
                   " cannot be written any more: ", strerror(reason)));
    }
    if (rank.is_raw && stream.to == 2) {
      output_.put(2, bytes);
      is_half_line_ = bytes.back() != '\n';
    }
    stream.splitter.feed(bytes, line);
    done += bytes.size();
  }
}

// Of a rank that has ended: what it started may hold its pipes open, but all that it wrote is here.
void Job::finish_streams(Rank& rank) {
  for (Stream* stream : {&rank.out, &rank.err}) {
    read_stream(rank, *stream, kPipe);
    stream->splitter.finish([&](std::string_view line) { take_line(rank, stream->to, line); });
  }
}

void Job::take_line(Rank& rank, int to, std::string_view line) {
  if (to == 1) {
    release_held(rank);
    if (rank.out.is_shown) write_line(rank, to, line);
    return;
  }
  rank.tail.add(line);
  if (rank.is_raw || !rank.err.is_shown) return;
  if (rank.held.empty()) rank.held_since = Clock::now();
  rank.held.emplace_back(line);
  if (rank.held.size() >= kMaxHeld) release_held(rank);
}

void Job::write_line(const Rank& rank, int to, std::string_view line) {
  if (redraws_ && isatty(to)) {
    output_.put(to, "\r\x1b[K");
  } else if (to == 2 && std::exchange(is_half_line_, false)) {
    output_.put(to, "\n");
  }
  output_.put(to, concat(prefix(rank), line, '\n'));
}

std::string Job::prefix(const Rank& rank) const {
  std::string text = options_.line_prefix;
  for (const auto& [name, value] : {std::pair("${rank}", std::to_string(rank.rank)),
                                    std::pair("${local_rank}", std::to_string(rank.local_rank)),
                                    std::pair("${role_name}", options_.role)}) {
    for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at))
      text.replace(at, std::string_view(name).size(), value), at += value.size();
  }
  return text;
}

void Job::release_held(Rank& rank) {
  for (const std::string& line : rank.held) write_line(rank, 2, line);
  rank.held.clear();
}

void Job::show_last_words() {
  std::set<std::string> shown;
  for (Rank& rank : ranks_) {
    if (!rank.failed) continue;
    const bool shares = options_.output == LaunchOutput::kProgram || rank.usage_error;
    if (!shares) {
      release_held(rank);
      continue;
    }
    std::erase_if(rank.held, [&](const std::string& line) { return shown.contains(line); });
    release_held(rank);
    shown.insert(rank.tail.lines().begin(), rank.tail.lines().end());
  }
}

// ---- how they end

void Job::take_signals() {
  for (int signal = signals_.take(); signal != 0; signal = signals_.take()) {
    switch (signal) {
      case SIGCHLD:
        break;
      case SIGTSTP:
        suspend();
        break;
      default:
        interrupt(signal);
    }
  }
  check_ranks();
  tend_orphans();
}

void Job::check_ranks() {
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0) {
      continue;
    }
    const bool by_signal = info.si_code != CLD_EXITED;
    rank_ended(rank, by_signal ? 0 : info.si_status, by_signal ? info.si_status : 0);
  }
}

void Job::rank_ended(Rank& rank, int exit_code, int signal) {
  rank.ended = true;
  finish_streams(rank);
  RankEnd end{.rank = rank.rank,
              .local_rank = rank.local_rank,
              .pid = rank.pid,
              .exit_code = exit_code,
              .signal = signal,
              .seconds = std::chrono::duration<double>(Clock::now() - started_).count(),
              .stopped = phase_ >= Phase::kStopping};
  if (end.failed()) {
    // An exit code was meant, so the last line says why; a signal comes from outside.
    end.error = rank.tail.last_error(/*any=*/signal == 0);
    end.log = rank.log_path;
    rank.failed = true;
    rank.usage_error = signal == 0 && exit_code == 2;
    if (phase_ == Phase::kRunning) {
      phase_ = Phase::kSettling;
      first_failure_ = Clock::now();
    }
  }
  ends_.push_back(std::move(end));
  if (all_ended() && phase_ < Phase::kStopping) stop_ranks();
}

Job::Clock::time_point Job::settled_at() const {
  const bool usage = std::all_of(ranks_.begin(), ranks_.end(),
                                 [](const Rank& r) { return !r.failed || r.usage_error; });
  return first_failure_ + (usage ? std::max(options_.settle, kUsageSettle) : options_.settle);
}

void Job::interrupt(int signal) {
  if (phase_ >= Phase::kStopping) {
    kill_ranks();
    if (all_ended()) output_.clear();  // nobody reads
    return;
  }
  interrupted_by_ = signal;
  stop_ranks();
}

void Job::stop_ranks() {
  phase_ = Phase::kStopping;
  const bool has_failed =
      std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.failed; });
  if (has_failed && interrupted_by_ == 0 && hooks_.on_failure) hooks_.on_failure(ends_);
  stop_until_ = Clock::now() + options_.grace;
  show_last_words();
  signal_groups(SIGTERM);
  signal_groups(SIGCONT);  // one that is suspended would not see it
  tend_orphans();
}

void Job::kill_ranks() {
  phase_ = Phase::kKilling;
  signal_groups(SIGKILL);
  tend_orphans();
}

void Job::signal_groups(int signal) {
  for (const Rank& rank : ranks_) kill(-rank.pid, signal);
}

void Job::suspend() {
  signal_groups(SIGSTOP);
  kill(getpid(), SIGSTOP);  // returns when we are continued
  signal_groups(SIGCONT);
}

// Reaps those that have ended; once the job stops, ends the others. Returns whether any is left.
bool Job::tend_orphans() {
  bool is_any_left = false;
  for (pid_t pid : child_processes()) {
    if (std::count(children_before_.begin(), children_before_.end(), pid) ||
        std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.pid == pid; })) {
      continue;
    }
    const pid_t ended = waitpid(pid, nullptr, WNOHANG);
    // No child of this process: /proc is of another namespace, and the number somebody else's.
    if (ended == pid || (ended < 0 && errno == ECHILD)) continue;
    is_any_left = true;
    if (phase_ == Phase::kKilling) {
      kill(pid, SIGKILL);
    } else if (phase_ == Phase::kStopping && asked_to_stop_.insert(pid).second) {
      kill(pid, SIGTERM);
      kill(pid, SIGCONT);
    }
  }
  return is_any_left;
}

bool Job::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; });
}

bool Job::is_gone() { return all_ended() && !tend_orphans(); }

// ---- the end

bool Job::is_usage_error() const {
  if (ranks_.empty() || ends_.empty()) return false;
  const bool all_say_so =
      std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.usage_error; });
  return all_say_so && (ranks_.size() == 1 || !failures_by_cause(ends_).front().error.empty());
}

void Job::say(std::string_view text) {
  // Keeps the line that rank 0 was redrawing.
  if (is_half_line_ || (redraws_ && isatty(2))) output_.put(2, "\n");
  is_half_line_ = redraws_ = false;
  output_.put(2, concat(text, '\n'));
}

}  // namespace sherd::dist
