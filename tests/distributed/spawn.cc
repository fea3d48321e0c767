#include "tests/distributed/spawn.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "core/context.h"
#include "core/threads.h"
#include "distributed/launcher/mpi_world.h"
#include "distributed/mpi/mpi_job.h"
#include "distributed/socket.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

// What ranks whose deadline passes write down is not to stay in /tmp.
[[maybe_unused]] const int kFlightRecords =
    setenv("SHERD_FLIGHT_RECORD", testing::TempDir().c_str(), 0);

bool is_over_mpi(const ProcessOptions& options) {
  const char* variable = std::getenv("SHERD_BACKEND");
  return options.backend == "mpi" ||
         (options.backend == "auto" && variable && std::string(variable) == "mpi");
}

[[noreturn]] void be_rank(int rank, int ranks, const Socket& listener, const MpiWorld* mpi,
                          const std::function<void(int)>& f, const ProcessOptions& options) {
  if (mpi)
    for (const std::string& entry : mpi->environment(rank)) {
      const size_t equals = entry.find('=');
      set(entry.substr(0, equals).c_str(), entry.substr(equals + 1));
    }
  set_num_threads(1);
  set("RANK", std::to_string(rank));
  set("LOCAL_RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(ranks));
  set("LOCAL_WORLD_SIZE", std::to_string(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(address_of(listener).port()));
  if (rank == 0)
    set("SHERD_STORE_FD", std::to_string(listener.fd()));
  else
    close(listener.fd());
  int code = 0;
  try {
    if (options.init) init_process_group({.backend = options.backend, .timeout = options.timeout});
    f(rank);
    if (is_initialized()) destroy_process_group();
    code = testing::Test::HasFailure();
    if (mpi && !options.may_fail) finalize_mpi();  // which waits for the others
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    code = 1;
  }
  std::fflush(nullptr);
  _exit(code);
}

std::string describe(int rank, const ProcessResult& r) {
  return concat(
      "rank ", rank, ": ",
      r.signal ? concat("killed by signal ", r.signal) : concat("exit code ", r.exit_code),
      r.output.empty() ? "" : ", said: ", r.output);
}

}  // namespace

void run_ranks(int ranks, const std::function<void(int rank)>& f, const RankOptions& options) {
  const int threads_before = num_threads();
  set_num_threads(1);
  auto store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Context context;
      ContextGuard guard(context);
      try {
        if (options.init)
          init_process_group({.backend = options.backend,
                              .rank = rank,
                              .world_size = ranks,
                              .timeout = options.timeout,
                              .store = store,
                              .local_rank = rank,
                              .local_world_size = ranks});
        f(rank);
        if (is_initialized()) destroy_process_group();
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        errors += concat(errors.empty() ? "" : "\n", "rank ", rank, ": ", e.what());
      }
    });
  }
  for (auto& t : threads) t.join();
  set_num_threads(threads_before);
  if (!errors.empty()) throw Error(errors);
}

std::vector<ProcessResult> run_processes(int ranks, const std::function<void(int rank)>& f,
                                         const ProcessOptions& options) {
  Socket listener = listen_on(resolve("127.0.0.1", 0, "the test's address")[0]);
  std::vector<ProcessResult> results(ranks);
  std::optional<MpiWorld> mpi;
  if (is_over_mpi(options)) mpi.emplace(ranks);
  std::vector<pid_t> pids;
  std::vector<Socket> outputs;
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail("[run_processes] pipe failed");
    const pid_t pid = fork();
    if (pid < 0) fail("[run_processes] fork failed");
    if (pid == 0) {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      be_rank(rank, ranks, listener, mpi ? &*mpi : nullptr, f, options);
    }
    close(ends[1]);
    outputs.emplace_back(ends[0]);
    pids.push_back(pid);
  }
  listener = Socket();  // were it open here, ranks could still connect after rank 0 is gone

  std::string errors;
  const auto deadline = Clock::now() + options.kill_after;
  bool killed = false;
  for (size_t open = pids.size(); open > 0;) {
    std::vector<pollfd> fds;
    for (const Socket& s : outputs) fds.push_back({s.fd(), POLLIN, 0});
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now()).count();
    if (poll(fds.data(), fds.size(), int(std::max<int64_t>(0, left))) == 0 && !killed) {
      killed = true;
      for (const pid_t pid : pids)
        if (pid > 0) kill(pid, SIGKILL);
      errors = concat("killed, since not all had ended after ", options.kill_after.count(), " ms");
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (!fds[rank].revents) continue;
      char block[4096];
      const ssize_t n = read(fds[rank].fd, block, sizeof block);
      if (n > 0) {
        results[rank].output.append(block, n);
        continue;
      }
      outputs[rank] = Socket();  // a negative descriptor is skipped by poll
      --open;
      int status = 0;
      waitpid(std::exchange(pids[rank], 0), &status, 0);
      if (WIFSIGNALED(status)) results[rank].signal = WTERMSIG(status);
      if (WIFEXITED(status)) results[rank].exit_code = WEXITSTATUS(status);
      if (!results[rank].ok())
        errors += concat(errors.empty() ? "" : "\n", describe(rank, results[rank]));
    }
  }
  if (!errors.empty() && !options.may_fail) throw Error(errors);
  return results;
}

std::string why_no_mpi() {
#ifdef __SANITIZE_THREAD__
  return "Open MPI's libraries are not instrumented";
#endif
  return MpiWorld::is_installed() ? "" : "mpirun is not installed";
}

}  // namespace sherd::dist
