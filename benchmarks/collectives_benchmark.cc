// What collectives cost on one host: 2 ranks, 1 KiB to 256 MiB of float32; the whole tensor's bytes
// by the clock, and the processor time that rank 0 spent (which tells something on a machine that
// others use too).
//
//     ./bazelw run //benchmarks:collectives            # --ranks=4 --backend=gloo (shm, mpi) --csv
//
// collectives_side_by_side.py puts PyTorch and Open MPI beside it.
//
// The first line says what memory itself gives: all ranks at once copy 64 MiB of their own, by
// memcpy or past the caches, whichever is faster, until the last is done; the bytes read and
// written by one of them a second are shown.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "distributed/copy_bytes.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

struct Cost {  // microseconds a call
  double clock = 1e30, cpu = 1e30;
};

double cpu_time() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  auto us = [](const timeval& t) { return 1e6 * double(t.tv_sec) + double(t.tv_usec); };
  return us(u.ru_utime) + us(u.ru_stime);
}

// The best of 5 series.
Cost cost_of(int calls, const std::function<void()>& f) {
  using Clock = std::chrono::steady_clock;
  Cost best;
  for (int series = 0; series < 5; ++series) {
    barrier();
    const auto start = Clock::now();
    const double cpu = cpu_time();
    for (int i = 0; i < calls; ++i) f();
    const std::chrono::duration<double, std::micro> t = Clock::now() - start;
    best.clock = std::min(best.clock, t.count() / calls);
    best.cpu = std::min(best.cpu, (cpu_time() - cpu) / calls);
  }
  return best;
}

void run(int rank, int ranks, bool csv) {
  const Group& group = default_group();
  const char* const names[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"};
  {
    const Tensor from = full({16 << 20}, 1), to = full({16 << 20}, 2);
    double us = 1e30;
    for (const bool stream : {false, true}) {
      const auto copies = [&] {
        for (int i = 0; i < 4; ++i) copy_bytes(to.bytes(), from.bytes(), 64 << 20, stream);
        barrier();
      };
      us = std::min(us, cost_of(1, copies).clock / 4);
    }
    if (rank == 0 && csv) std::printf("copy,%d,%.1f\n", 64 << 20, us);
    if (rank == 0 && !csv) {
      std::printf("%d ranks, %s; each reads and writes %.2f GB/s\n%10s", ranks,
                  group->backend().c_str(), (128 << 20) / us / 1e3, "bytes");
      for (const char* name : names) std::printf(" %35s", name);
      std::printf("\n");
    }
  }
  for (int64_t bytes = 1 << 10; bytes <= 256 << 20; bytes *= 4) {
    const int64_t piece = bytes / 4 / ranks;
    const Tensor whole = full({piece * ranks}, 1);
    const Tensor mine = whole.as_strided_raw({piece}, {1}, rank * piece);
    const int calls = bytes <= 1 << 16 ? 200 : bytes <= 4 << 20 ? 20 : 4;
    const Cost costs[] = {
        cost_of(calls, [&] { group->all_reduce(whole).wait(); }),
        cost_of(calls, [&] { group->all_gather_pieces({whole}, {mine}).wait(); }),
        cost_of(calls, [&] { group->reduce_scatter_pieces({mine}, {whole}).wait(); }),
        cost_of(calls, [&] { group->broadcast(whole, 0).wait(); })};
    if (rank != 0) continue;
    if (!csv) std::printf("%10lld", static_cast<long long>(bytes));
    for (int i = 0; i < 4; ++i) {
      if (csv)
        std::printf("%s,%lld,%.1f\n", names[i], static_cast<long long>(bytes), costs[i].clock);
      else
        std::printf(" %9.0f us %5.2f GB/s, cpu %6.0f us", costs[i].clock,
                    double(bytes) / costs[i].clock / 1e3, costs[i].cpu);
    }
    if (!csv) std::printf("\n");
  }
}

}  // namespace
}  // namespace sherd::dist

int main(int argc, char** argv) {
  int ranks = 2;
  bool csv = false;
  std::string backend = "auto";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--ranks=", 8) == 0) ranks = std::atoi(argv[i] + 8);
    if (std::strncmp(argv[i], "--backend=", 10) == 0) backend = argv[i] + 10;
    if (std::strcmp(argv[i], "--csv") == 0) csv = true;
  }
  const auto results =
      sherd::dist::run_processes(ranks, [&](int rank) { sherd::dist::run(rank, ranks, csv); },
                                 {.kill_after = std::chrono::minutes(10), .backend = backend});
  std::printf("%s", results[0].output.c_str());
}
