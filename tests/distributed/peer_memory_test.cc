// What a rank does in the memory of others: which of their pages it keeps mapped, what its own
// memory is made of, and that nobody writes into it once it has given up.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>

#include "core/context.h"
#include "distributed/shm/arena.h"
#include "distributed/shm/node.h"
#include "distributed/shm/shm_group.h"
#include "tests/distributed/spawn.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kMiB = 1 << 20;

// Bytes of [data, data + bytes) that are in this process's page tables.
int64_t mapped_bytes(const char* data, int64_t bytes) {
  const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const int64_t page = page_bytes(), first = int64_t(uintptr_t(data)) / page;
  const int64_t end = (int64_t(uintptr_t(data)) + bytes + page - 1) / page;
  std::vector<uint64_t> entries(end - first);
  const ssize_t n = pread(file, entries.data(), entries.size() * 8, first * 8);
  close(file);
  if (n != ssize_t(entries.size() * 8)) fail("cannot read the page tables");
  return page * std::count_if(entries.begin(), entries.end(), [](uint64_t e) { return e >> 63; });
}

// A block of a peer's, of small pages, so that those which are mapped can be counted one by one.
struct Block {
  Block(PeerPages& pages, int64_t bytes) : view(small_pages(bytes), &pages), bytes(bytes) {
    data = view.at({0, bytes, 0}, bytes);
  }
  static Fd small_pages(int64_t bytes) {
    Fd file(memfd_create("test", MFD_CLOEXEC));
    if (fallocate(file.fd(), 0, 0, bytes) != 0) fail("no memory for the test");
    return file;
  }
  int64_t mapped() const { return mapped_bytes(data, bytes); }
  ArenaView view;
  int64_t bytes;
  char* data;
};

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // since Linux 5.14, and in headers later
#endif

bool maps_ahead() {
  char* const data = static_cast<char*>(
      mmap(nullptr, page_bytes(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const bool yes = madvise(data, page_bytes(), MADV_POPULATE_READ) == 0;
  munmap(data, page_bytes());
  return yes;
}

int64_t sum_of(PeerPages& pages, const char* data, int64_t bytes) {
  int64_t sum = 0, next = 0;
  pages.for_each_slice({&data, 1}, bytes, [&](int64_t begin, int64_t end) {
    EXPECT_EQ(begin, next);
    next = end;
    if (maps_ahead()) {
      EXPECT_GE(mapped_bytes(data + begin, end - begin), end - begin);
    }
    sum += std::accumulate(data + begin, data + end, int64_t(0));
  });
  EXPECT_EQ(next, bytes);
  return sum;
}

TEST(PeerPages, StayUpToTheBound) {
  PeerPages pages(4 * kMiB);
  Block small(pages, 1 * kMiB), large(pages, 20 * kMiB);
  std::memset(large.data, 1, large.bytes);
  madvise(large.data, large.bytes, MADV_DONTNEED);
  EXPECT_EQ(sum_of(pages, small.data, small.bytes), 0);
  EXPECT_EQ(small.mapped(), 1 * kMiB);
  EXPECT_EQ(sum_of(pages, large.data + 100'001, large.bytes - 200'000), large.bytes - 200'000);
  EXPECT_EQ(pages.kept(), 3 * kMiB);  // a chunk of 2 MiB beside the small block
  EXPECT_EQ(small.mapped(), 1 * kMiB);
  EXPECT_GT(large.mapped(), 3 * kMiB / 2);
  EXPECT_LE(large.mapped(), 2 * kMiB);
  // And are there when they are read again.
  const int64_t before = large.mapped();
  EXPECT_EQ(sum_of(pages, large.data + 200'000, 1000), 1000);
  EXPECT_EQ(large.mapped(), before);
  EXPECT_EQ(sum_of(pages, large.data + 9 * kMiB, 1000), 1000);  // these pass by
  EXPECT_EQ(large.mapped(), before);
}

TEST(PeerPages, WhatIsNotUsedMakesRoom) {
  PeerPages pages(2 * kMiB);
  Block first(pages, 2 * kMiB), second(pages, 6 * kMiB);
  sum_of(pages, first.data, first.bytes);
  EXPECT_EQ(first.mapped(), 2 * kMiB);
  for (int i = 0; i < 2; ++i) sum_of(pages, second.data, second.bytes);
  EXPECT_EQ(first.mapped(), 2 * kMiB);  // 12 MiB were read since: it may come round again
  EXPECT_EQ(second.mapped(), 0);
  sum_of(pages, second.data, second.bytes);
  EXPECT_EQ(first.mapped(), 0);
  EXPECT_EQ(second.mapped(), 2 * kMiB);
  EXPECT_EQ(pages.kept(), 2 * kMiB);
}

TEST(PeerPages, BlocksThatGoAreForgotten) {
  PeerPages pages(2 * kMiB);
  {
    Block first(pages, 2 * kMiB);
    sum_of(pages, first.data, first.bytes);
    EXPECT_EQ(pages.kept(), 2 * kMiB);
  }
  EXPECT_EQ(pages.kept(), 0);
  Block second(pages, 2 * kMiB);  // maybe at the same address
  sum_of(pages, second.data, second.bytes);
  EXPECT_EQ(second.mapped(), 2 * kMiB);
}

// Memory of this process may begin where a block ends: it must not lose its contents.
TEST(PeerPages, OnlyBlocksAreTouched) {
  PeerPages pages(64 << 10);
  Block small(pages, 64 << 10);
  char* const own =
      static_cast<char*>(mmap(small.data + small.bytes, page_bytes(), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
  ASSERT_EQ(own, small.data + small.bytes);
  own[0] = 7;
  sum_of(pages, small.data, small.bytes);
  Block other(pages, 64 << 10);
  for (int i = 0; i < 10; ++i) sum_of(pages, other.data, other.bytes);
  EXPECT_EQ(small.mapped(), 0);
  EXPECT_EQ(own[0], 7);
  munmap(own, page_bytes());
  // What lies in no block is read as it is.
  std::vector<char> elsewhere(10 * kMiB, 1);
  EXPECT_EQ(sum_of(pages, elsewhere.data(), 10 * kMiB), 10 * kMiB);
}

// The huge pages of the mapping at `data`, in bytes.
int64_t huge_bytes(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  const auto at = reinterpret_cast<uintptr_t>(data);
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) found = at >= begin && at < end;
    if (found && std::sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kib) == 1)
      return int64_t(kib) << 10;
  }
  return 0;
}

TEST(Arena, IsMadeOfHugePagesWhereThereAreAny) {
  Arena arena;
  for (int64_t bytes : {int64_t(4096), 2 * kMiB, 7 * kMiB + 8192}) {
    char* data = arena.take(bytes);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(uintptr_t(data) % kHugePage, 0u);
    EXPECT_EQ(std::count(data, data + bytes, 0), bytes);
    std::memset(data, 1, bytes);
    const Place place = arena.find(data, bytes);
    EXPECT_EQ(place.block % kHugePage, 0);
    ArenaView view{Fd(dup(arena.fd()))};
    const char* seen = view.at(place, bytes);
    EXPECT_EQ(uintptr_t(seen) % kHugePage, 0u);
    EXPECT_EQ(std::count(seen, seen + bytes, 1), bytes);
    const int64_t huge = bytes / kHugePage * kHugePage;
    if (huge > 0 && huge_bytes(data) == 0)
      GTEST_SKIP() << "the system makes no huge pages of shared memory (Linux 6.1 and later do)";
    EXPECT_LE(huge_bytes(data), huge);  // fewer where free memory lies in splinters
    EXPECT_EQ(huge_bytes(seen), huge_bytes(data));
    arena.give_back(data, bytes);
  }
}

// What older systems do, and those whose free memory lies in splinters.
TEST(Arena, DoesWithoutHugePages) {
  run_processes(2,
                [](int rank) {
                  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
                  const int64_t numel = 5'000'001;
                  const Tensor x = full({numel}, rank + 1);
                  EXPECT_EQ(huge_bytes(x.bytes()), 0);
                  all_reduce(x);
                  EXPECT_EQ(std::count(x.data<float>(), x.data<float>() + numel, 3.0f), numel);
                  x.data<float>()[numel - 1] = float(rank);
                  broadcast(x, 1);
                  EXPECT_EQ(x.data<float>()[numel - 1], 1);
                  const Tensor all = zeros({2 * numel});
                  all_gather_into_tensor(all, x);
                  EXPECT_EQ(std::count(all.data<float>(), all.data<float>() + 2 * numel, 3.0f),
                            2 * numel - 2);
                },
                {.backend = "shm"});
}

// Parts of one tensor may share a page, in any order.
TEST(Arena, DetachedPartsMayShareAPage) {
  for (const bool in_order : {true, false}) {
    Arena arena;
    const int64_t bytes = 1 * kMiB;
    char* data = arena.take(bytes);
    ArenaView view{Fd(dup(arena.fd()))};
    char* const peer = view.at(arena.find(data, bytes), bytes);
    std::memset(data, 1, bytes);
    struct Part {
      int64_t at, bytes;
    };
    std::vector<Part> parts = {{0, 2000}, {4000, 196'000}, {200'000, 10'000}, {2000, 2000}};
    if (!in_order) std::reverse(parts.begin(), parts.end());
    for (const Part& part : parts) {
      arena.detach(data + part.at, part.bytes);
      std::memset(data + part.at, 3, part.bytes);  // another detach keeps it
    }
    std::memset(peer, 2, bytes);
    EXPECT_EQ(std::count(data, data + 210'000, 3), 210'000);
    for (const Part& part : parts) EXPECT_EQ(arena.find(data + part.at, part.bytes).block, -1);
    EXPECT_GE(arena.find(data + 300'000, 1000).block, 0);
    EXPECT_EQ(data[300'000], 2);
    arena.give_back(data, bytes);
  }
}

TEST(Arena, DetachedBytesAreSeenByNobodyElse) {
  Arena arena;
  const int64_t bytes = 3 * kMiB, page = page_bytes();
  char* data = arena.take(bytes);
  std::memset(data, 1, bytes);
  ArenaView view{Fd(dup(arena.fd()))};
  char* const peer = view.at(arena.find(data, bytes), bytes);
  arena.detach(data + page + 100, page);  // parts of two pages
  EXPECT_EQ(std::count(data, data + bytes, 1), bytes);
  std::memset(peer, 2, bytes);
  EXPECT_EQ(std::count(data, data + bytes, 2), bytes - 2 * page);
  EXPECT_EQ(std::count(data + page, data + 3 * page, 1), 2 * page);
  // Whoever looks for them learns that peers cannot be told of them.
  EXPECT_EQ(arena.find(data, page).offset, 0);
  EXPECT_EQ(arena.find(data, page + 1).block, -1);
  EXPECT_EQ(arena.find(data + 2 * page, 1).block, -1);
  EXPECT_EQ(arena.find(data + 3 * page, page).offset, 3 * page);
  arena.give_back(data, bytes);
  EXPECT_EQ(std::count(peer, peer + bytes, 0), bytes);
}

// Two ranks' ends of a group, in one process.
void run_pair(const std::function<void(int rank, ShmGroup&)>& f) {
  MemoryStore store;
  std::vector<std::thread> threads;
  std::string errors[2];
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      Context context;
      ContextGuard guard(context);
      try {
        const auto patience = std::chrono::seconds(20);
        ShmGroup group(Node::meet(store, rank, 2, patience), rank, {0, 1}, store, patience);
        f(rank, group);
      } catch (const std::exception& e) {
        errors[rank] = e.what();
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
}

TEST(Writing, EndsWhenTheOwnerGivesUp) {
  std::atomic<int> step = 0;
  const auto await = [&](int n) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (step < n && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_GE(step, n) << "the other rank failed";
  };
  run_pair([&](int rank, ShmGroup& group) {
    if (rank == 1) {
      {
        const ShmGroup::Writing writing(group, 0);
        step = 1;
        await(2);
        std::this_thread::sleep_for(milliseconds(50));
      }
      await(3);
      EXPECT_THROW(ShmGroup::Writing(group, 0), ConnectionLost);
      step = 4;
      return;
    }
    await(1);
    group.close();
    EXPECT_FALSE(group.await_writers(milliseconds(1)));  // who has begun is waited for,
    step = 2;
    EXPECT_TRUE(group.await_writers(std::chrono::seconds(20)));
    step = 3;  // and nobody begins any more,
    await(4);
    EXPECT_TRUE(group.await_writers(milliseconds(0)));  // nor is one that was refused counted
  });
}

// Below and above each bound from which ranks do something else: who sums, who copies, slices.
TEST(Writing, SumsAndSharesAreWholeAtAllSizes) {
  run_ranks(3,
            [](int rank) {
              for (const DType dtype : {kFloat32, kBFloat16, kInt64})
                for (const int64_t bytes : {32 << 10, 48 << 10, 256 << 10, 768 << 10, 12 << 20})
                  for (const int64_t more : {-1, 0, 1, 7}) {
                    const int64_t numel = bytes / size_of(dtype) + more;
                    Tensor values = empty({numel}, kInt64);
                    for (int64_t i = 0; i < numel; ++i)
                      values.data<int64_t>()[i] = i % 31 + rank;  // sums are exact in bfloat16
                    const auto differ = [&](const Tensor& x, int64_t times, int64_t plus) {
                      const Tensor got = to_raw(x, kInt64);
                      int64_t n = 0;
                      for (int64_t i = 0; i < numel; ++i)
                        n += got.data<int64_t>()[i] != times * (i % 31) + plus;
                      return n;
                    };
                    const auto copy = [&] {
                      const Tensor c = empty({numel}, dtype);
                      copy_raw(c, to_raw(values, dtype));
                      return c;
                    };
                    const Tensor x = copy(), y = copy(), z = copy();
                    all_reduce(x);
                    EXPECT_EQ(differ(x, 3, 3), 0) << dtype << ", " << numel << " elements";
                    broadcast(y, 1);
                    EXPECT_EQ(differ(y, 1, 1), 0) << dtype << ", " << numel << " elements";
                    all_reduce_coalesced({y, z});
                    EXPECT_EQ(differ(y, 3, 3), 0) << dtype << ", " << numel << " elements";
                    EXPECT_EQ(differ(z, 3, 3), 0) << dtype << ", " << numel << " elements";
                  }
            },
            {.backend = "shm"});
}

// A child that stops this process, `delay` after go(), and lets it go on `pause` later.
class Stopper {
 public:
  Stopper(std::chrono::microseconds delay, std::chrono::microseconds pause) {
    if (pipe2(pipe_, O_CLOEXEC) != 0) fail("no pipe for the test");
    const pid_t me = getpid();
    child_ = fork();
    if (child_ != 0) return;
    close(pipe_[1]);
    char byte;
    if (read(pipe_[0], &byte, 1) == 1) {
      usleep(useconds_t(delay.count()));
      kill(me, SIGSTOP);
      usleep(useconds_t(pause.count()));
      kill(me, SIGCONT);
    }
    _exit(0);
  }
  ~Stopper() {
    close(pipe_[1]);
    close(pipe_[0]);
    waitpid(child_, nullptr, 0);
  }
  void go() { EXPECT_EQ(write(pipe_[1], "", 1), 1); }

 private:
  int pipe_[2];
  pid_t child_;
};

// A peer stands still in the midst of a transfer until this rank's deadline has passed and its
// error is told. What the rank does with its memory afterwards is its own affair.
class StoppedWriter : public testing::TestWithParam<std::pair<bool, int>> {};
INSTANTIATE_TEST_SUITE_P(
    All, StoppedWriter,
    // The error is told after some 2.5 s, or 2 s later if the peer has to be waited for so long.
    testing::Values(std::pair(false, 3500), std::pair(true, 3500), std::pair(false, 6500)),
    [](const auto& i) {
      return concat(i.param.first ? "broadcast" : "all_reduce", "_", i.param.second);
    });

TEST_P(StoppedWriter, TouchesNoMemoryOfARankThatGaveUp) {
  const auto [broadcasts, pause] = GetParam();
  const auto results = run_processes(
      2,
      [&](int rank) {
        constexpr int64_t kNumel = 64 << 20;
        constexpr int kAttempts = 10;  // it may be stopped too early, or too late
        Tensor x = empty({kNumel}), hit = zeros({1});
        const auto fill = [&](float value) { std::fill_n(x.data<float>(), kNumel, value); };
        const auto count = [&](float value) {
          return std::count(x.data<float>(), x.data<float>() + kNumel, value);
        };
        for (int i = 0; i < kAttempts && hit.data<float>()[0] == 0; ++i) {
          const Group group = new_group({0, 1});
          fill(float(2 - rank));
          CollectiveOptions options;
          if (rank == 0) options.timeout = milliseconds(50);
          const auto call = [&] {
            (broadcasts ? group->broadcast(x, 1, options)
                        : group->all_reduce(x, ReduceOp::kSum, options))
                .wait();
          };
          if (rank == 1) {
            Stopper stopper(milliseconds(1), milliseconds(pause));
            barrier();
            stopper.go();
            error_of(call);
            barrier();
          } else {
            barrier();
            const bool gave_up = error_of(call).find("waited 50 ms") != std::string::npos;
            // The sums, or the root's values: half of them this rank puts there itself.
            const int64_t written = count(broadcasts ? 1.0f : 3.0f);
            if (gave_up && written > kNumel / 2 && written < kNumel) hit.data<float>()[0] = 1;
            fill(-5);
            barrier();  // the peer has gone on, and its call has ended
            EXPECT_EQ(count(-5), kNumel);
          }
          broadcast(hit, 0);
        }
        EXPECT_EQ(hit.data<float>()[0], 1) << "in " << kAttempts << " attempts no write was cut";
        // The memory is as good as any other for what comes then.
        x = {};
        for (const int64_t numel : {kNumel, kNumel / 8, kNumel / 8 + 1}) {
          const Tensor y = full({numel}, rank + 1), z = zeros({numel});
          const Work sent = isend(y, 1 - rank);
          recv(z, 1 - rank);
          sent.wait();
          EXPECT_EQ(std::count(z.data<float>(), z.data<float>() + numel, float(2 - rank)), numel);
          all_reduce(y);
          EXPECT_EQ(std::count(y.data<float>(), y.data<float>() + numel, 3.0f), numel);
        }
      },
      {.kill_after = std::chrono::minutes(2), .backend = "shm"});
  for (const auto& r : results) EXPECT_TRUE(r.ok()) << r.output;
}

}  // namespace
}  // namespace sherd::dist
