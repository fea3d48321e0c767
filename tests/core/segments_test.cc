#include "core/cpu/segments.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/allocator.h"
#include "core/context.h"
#include "core/tensor.h"
#include "tests/errors.h"

namespace sherd {
namespace {

using cpu::Segments;

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;

// Counts what is out, and has so many bytes: one after another of one piece of memory, each once.
class CountingSource : public BlockSource {
 public:
  explicit CountingSource(int64_t most)
      : left_(most),
        memory_(static_cast<char*>(mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~CountingSource() override {
    EXPECT_TRUE(out_.empty());
    munmap(memory_, kAddresses);
  }
  char* take(int64_t bytes) override {
    if (bytes > left_ || bytes > kAddresses - end_) {
      errno = ENOMEM;
      return nullptr;
    }
    left_ -= bytes;
    char* data = memory_ + end_;
    end_ += bytes;
    out_[data] = bytes;
    return data;
  }
  void give_back(char* data, int64_t bytes) override {
    left_ += bytes;
    EXPECT_EQ(out_.at(data), bytes);
    out_.erase(data);
    madvise(data, size_t(bytes), MADV_DONTNEED);
  }
  int blocks() const { return int(out_.size()); }
  bool has(const char* data) const { return data >= memory_ && data < memory_ + end_; }

 private:
  static constexpr int64_t kAddresses = int64_t(1) << 36;
  int64_t left_, end_ = 0;
  char* memory_;
  std::map<char*, int64_t> out_;
};

TEST(Segments, WhatWasLargeServesManySmallOnesAndGrowsTogetherAgain) {
  Segments s;
  char* large = s.take(16 * kMiB);
  s.put(large);
  for (int round = 0; round < 3; ++round) {
    std::vector<char*> small;
    for (int i = 0; i < 16; ++i) small.push_back(s.take(kMiB));
    std::shuffle(small.begin(), small.end(), std::mt19937(round));
    for (char* p : small) s.put(p);
    EXPECT_EQ(s.take(16 * kMiB), large);
    s.put(large);
  }
  EXPECT_EQ(s.system_calls(), 1);
  EXPECT_EQ(s.reserved(), 16 * kMiB);
  s.release_free();
  EXPECT_EQ(s.system_calls(), 2);
  EXPECT_EQ(s.reserved(), 0);
}

TEST(Segments, SmallOnesShareASegmentAndThePieceThatFitsBestIsCut) {
  Segments s;
  char *a = s.take(100 * kKiB), *b = s.take(64 * kKiB + 1), *c = s.take(kMiB);
  EXPECT_EQ(s.system_calls(), 1);
  EXPECT_EQ(b, a + 100 * kKiB);
  EXPECT_EQ(c, b + 68 * kKiB);  // multiples of 4 KiB
  s.put(a);                     // the end of the segment is free too, and larger
  EXPECT_EQ(s.take(80 * kKiB), a);
  EXPECT_EQ(s.take(20 * kKiB), a + 80 * kKiB);
}

TEST(Segments, OfMoreThan16MiBServeAnEighthOfThemAndMore) {
  Segments s;
  char *large = s.take(64 * kMiB), *middle = s.take(16 * kMiB);
  s.put(large);
  s.put(middle);
  EXPECT_EQ(s.take(64 * kKiB), middle);
  s.put(middle);
  EXPECT_EQ(s.take(16 * kMiB), middle);
  EXPECT_EQ(s.system_calls(), 2);
  char* less = s.take(8 * kMiB - 4096);
  EXPECT_EQ(s.system_calls(), 3);
  s.put(less);
  s.release_free();
  EXPECT_EQ(s.system_calls(), 5);
  EXPECT_EQ(s.reserved(), 16 * kMiB);
  large = s.take(64 * kMiB);
  s.put(large);
  EXPECT_EQ(s.take(8 * kMiB), large);
  EXPECT_EQ(s.take(56 * kMiB), large + 8 * kMiB);
}

// None of them fits into what those before left.
TEST(Segments, SizesThatGrowDoNotPileUp) {
  Segments s;
  const char* kept = s.take(3 * kMiB);
  int64_t size = 4 * kMiB;
  for (int i = 0; i < 1000; ++i, size += 4096) {
    s.put(s.take(size));
    ASSERT_LE(s.reserved(), 2 * (3 * kMiB + size) + 64 * kMiB) << i;
  }
  EXPECT_LT(s.system_calls(), 2000);
  // Where it is not so much, nothing goes back.
  Segments few;
  for (int i = 1; i < 6; ++i) few.put(few.take(i * 4 * kMiB));
  EXPECT_EQ(few.system_calls(), 5);
  EXPECT_NE(kept, nullptr);
}

TEST(Segments, ASegmentOfWhichAPieceIsUsedStays) {
  Segments s;
  char *a = s.take(kMiB), *b = s.take(kMiB);
  std::memset(b, 7, kMiB);
  s.put(a);
  s.release_free();
  EXPECT_EQ(s.reserved(), 2 * kMiB);
  EXPECT_EQ(b[kMiB - 1], 7);
  s.put(b);
  s.release_free();
  EXPECT_EQ(s.reserved(), 0);
}

TEST(Segments, NeighboursOfOtherSegmentsStayApart) {
  auto source = std::make_shared<CountingSource>(64 * kMiB);
  Segments s;
  s.set_source(source);
  char *a = s.take(2 * kMiB), *b = s.take(2 * kMiB);
  ASSERT_EQ(b, a + 2 * kMiB);
  s.put(a);
  s.put(b);
  s.take(4 * kMiB);
  EXPECT_EQ(source->blocks(), 3);
}

TEST(Segments, WhereTheSystemHasNoMoreWhatIsCachedServes) {
  auto source = std::make_shared<CountingSource>(80 * kMiB);
  Segments s;
  s.set_source(source);
  s.put(s.take(4 * kMiB));
  char* large = s.take(80 * kMiB);  // beside the other one it would be too much
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(s.reserved(), 80 * kMiB);
  errno = 0;
  EXPECT_EQ(s.take(64 * kKiB), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  s.put(large);
  EXPECT_EQ(s.take(79 * kMiB), large);
  char* rest = s.take(64 * kKiB);  // less than an eighth, but there is no other place
  EXPECT_EQ(rest, large + 79 * kMiB);
  EXPECT_EQ(source->blocks(), 1);
}

TEST(Segments, TakeNoMoreThanIsAskedForWhereTheSystemHasLittle) {
  Segments s;
  s.set_source(std::make_shared<CountingSource>(kMiB));
  EXPECT_NE(s.take(kMiB - 1), nullptr);
  EXPECT_EQ(s.reserved(), kMiB);
}

TEST(Segments, OfAnotherSourceServeNoMoreAndGoBackToIt) {
  auto first = std::make_shared<CountingSource>(64 * kMiB),
       second = std::make_shared<CountingSource>(64 * kMiB);
  Segments s;
  char *from_system = s.take(kMiB), *cached = s.take(kMiB / 2);
  s.put(cached);
  s.set_source(first);
  char *old = s.take(kMiB / 2), *old_too = s.take(kMiB / 2);
  EXPECT_TRUE(first->has(old) && first->has(old_too));
  s.set_source(second);
  s.put(old);  // a part of its segment
  EXPECT_EQ(first->blocks(), 1);
  char* young = s.take(kMiB / 2);
  EXPECT_TRUE(second->has(young));
  s.put(old_too);
  EXPECT_EQ(first->blocks(), 0);
  EXPECT_EQ(s.reserved(), 4 * kMiB);
  s.set_source(nullptr);  // what is left of the system's serves again
  EXPECT_EQ(s.take(kMiB / 2), cached);
  s.put(from_system);
  s.put(young);
  EXPECT_EQ(second->blocks(), 0);
  EXPECT_EQ(s.reserved(), 2 * kMiB);
}

// Sizes and an order at random, with refusals, changes of the source and releases in between: used
// pieces never overlap, keep what is in them, and all goes back.
TEST(Segments, RandomTakesAndPuts) {
  struct Used {
    int64_t bytes;
    uint64_t mark;
  };
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    const std::shared_ptr<CountingSource> sources[] = {std::make_shared<CountingSource>(200 * kMiB),
                                                       std::make_shared<CountingSource>(50 * kMiB),
                                                       nullptr};
    int refused = 0;
    {
      Segments s;
      std::map<char*, Used> used;
      const auto put = [&](std::map<char*, Used>::iterator u) {
        char* data = u->first;
        ASSERT_EQ(std::memcmp(data, &u->second.mark, 8), 0);
        ASSERT_EQ(std::memcmp(data + u->second.bytes - 8, &u->second.mark, 8), 0);
        s.put(data);
        used.erase(u);
      };
      for (int i = 0; i < 20000; ++i) {
        if (below(2000) == 0) s.set_source(sources[below(3)]);
        if (below(500) == 0) s.release_free();
        if (used.empty() || below(used.size() + 40) < 40) {
          const int shift = int(below(19));  // up to 64 MiB, small ones by far the most
          const int64_t bytes = 16 + int64_t(below(uint64_t(256) << (shift * shift / 18)));
          char* data = s.take(bytes);
          if (!data) {
            ++refused;
            continue;
          }
          ASSERT_EQ(uintptr_t(data) % 4096, 0u);
          const auto next = used.lower_bound(data);
          ASSERT_TRUE(next == used.end() || data + bytes <= next->first);
          if (next != used.begin()) {
            const auto before = std::prev(next);
            ASSERT_LE(before->first + before->second.bytes, data);
          }
          const Used u{bytes, random()};
          std::memcpy(data, &u.mark, 8);
          std::memcpy(data + bytes - 8, &u.mark, 8);
          used[data] = u;
        } else {
          put(std::next(used.begin(), int64_t(below(used.size()))));
        }
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(refused, 0) << "seed " << seed;
      while (!used.empty()) put(used.begin());
      s.release_free();
      EXPECT_EQ(s.reserved(), 0);
    }
  }
}

TEST(Allocator, CountsWhatIsReservedAndGivesItBack) {
  Context context;
  ContextGuard guard(context);
  Tensor small = empty({100}), medium = empty({16384}), large = empty({1 << 20});
  EXPECT_EQ(memory_stats().reserved, 448 + 2 * kMiB + 4 * kMiB);
  EXPECT_EQ(memory_stats().system_calls, 3);
  EXPECT_EQ(memory_stats().allocated, 448 + 64 * kKiB + 4 * kMiB);
  small = medium = large = Tensor();
  small = empty({100}), medium = empty({16384}), large = empty({1 << 20});
  EXPECT_EQ(memory_stats().system_calls, 3);
  small = medium = large = Tensor();
  context.cpu_allocator()->release_cached();
  EXPECT_EQ(memory_stats().reserved, 0);
  EXPECT_EQ(memory_stats().allocated, 0);
  EXPECT_EQ(memory_stats().system_calls, 6);
}

TEST(Allocator, SaysWhatTheSystemRefusesAndGoesOn) {
  Context context;
  ContextGuard guard(context);
  set_block_source(context, std::make_shared<CountingSource>(8 * kMiB));
  const Tensor most = empty({6 << 18});
  const MemoryStats before = memory_stats();
  const std::string text = error_of([] { empty({3 << 18}); });
  EXPECT_HAS(text, "[allocate] the system has no 3145728 bytes more (Cannot allocate memory)");
  EXPECT_HAS(text, "6291456 are in use and 6291456 reserved on the cpu");
  EXPECT_EQ(memory_stats().allocated, before.allocated);
  EXPECT_EQ(memory_stats().peak, before.peak);
  EXPECT_EQ(memory_stats().reserved, before.reserved);
  EXPECT_NO_THROW(empty({1 << 18}));
}

// The exit status of f() in a process that gets so much memory.
int status_within(size_t bytes, const std::function<void()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
    Context context;
    ContextGuard guard(context);
    try {
      f();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(Allocator, FreeingTakesNoMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory does not fit into the limit";
#endif
  EXPECT_EQ(status_within(size_t(1) << 30,
                          [] {
                            std::vector<Tensor> all;
                            all.reserve(1 << 22);
                            for (int64_t size : {1 << 20, 1 << 16, 100}) try {
                                for (;;) all.push_back(empty({size}));
                              } catch (const Error&) {
                              } catch (const std::bad_alloc&) {  // of a tensor's own few bytes
                              }
                            all.clear();
                            empty({100});
                          }),
            0);
}

TEST(Allocator, SmallBlocksGoBackWhereALargeOneIsRefused) {
  Context context;
  ContextGuard guard(context);
  set_block_source(context, std::make_shared<CountingSource>(8 * kMiB));
  const Tensor kept = empty({100});
  const int64_t before = memory_stats().reserved;
  {
    std::vector<Tensor> all;
    for (int i = 0; i < 100; ++i) all.push_back(empty({1000}));
  }
  EXPECT_GE(memory_stats().reserved, before + 400'000);
  EXPECT_THROW(empty({1 << 22}), Error);
  EXPECT_EQ(memory_stats().reserved, before);
}

TEST(Allocator, RefusesWhatNoSystemHas) {
  for (int64_t n : {INT64_MAX, INT64_MAX - 63, (int64_t(1) << 62) + 1, int64_t(1) << 62})
    EXPECT_THROW(empty({n}, kUInt8), Error) << n;
}

}  // namespace
}  // namespace sherd
