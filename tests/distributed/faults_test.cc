// What goes wrong between ranks ends in an error that says what, on every rank, and never in a
// hang.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string backend() { return std::getenv("SHERD_BACKEND"); }
bool over_mpi() { return backend() == "mpi"; }

void run_over_it(int ranks, const std::function<void(int)>& f,
                 milliseconds timeout = std::chrono::seconds(20)) {
  run_over(backend(), ranks, f, timeout);
}

// Each rank's error in `f`, the first by rank.
std::vector<std::string> errors_of(int ranks, const std::function<void(int)>& f,
                                   milliseconds timeout = std::chrono::seconds(10)) {
  std::vector<std::string> errors(ranks);
  if (!over_mpi()) {
    run_ranks(ranks, [&](int rank) { errors[rank] = error_of([&] { f(rank); }); },
              {.timeout = timeout});
    return errors;
  }
  // None ends before all have their text: rank 0 serves the store.
  void* shared =
      mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& know = *new (shared) std::atomic<int>(0);
  const auto results = run_processes(ranks,
                                     [&](int rank) {
                                       std::printf("\1%s\2", error_of([&] { f(rank); }).c_str());
                                       ++know;
                                       for (int i = 0; i < 500 && know < ranks; ++i)
                                         std::this_thread::sleep_for(milliseconds(10));
                                     },
                                     {.timeout = timeout, .may_fail = true});
  for (int r = 0; r < ranks; ++r) {
    const std::string& said = results[r].output;
    const size_t from = said.find('\1') + 1;
    errors[r] = said.substr(from, said.find('\2') - from);
  }
  return errors;
}

class OverBackend : public testing::Test {
 protected:
  void SetUp() override {
    if (over_mpi() && !why_no_mpi().empty()) GTEST_SKIP() << why_no_mpi();
  }
};
class Mismatch : public OverBackend {};
class Failed : public OverBackend {};
class Deadline : public OverBackend {};
class Debug : public OverBackend {};
class Peer : public OverBackend {};
class PointToPoint : public OverBackend {};

TEST_F(Mismatch, O_010_T_27_OtherOperation) {
  const auto errors = errors_of(2, [](int rank) {
    Tensor x = full({20, 10}, 1);
    for (int i = 0; i < 100; ++i) all_reduce(x);
    rank == 0 ? all_reduce(x, ReduceOp::kSum, {.label = "gradients"}) : reduce(x, 1);
  });
  for (const auto& e : errors) {
    EXPECT_HAS(e, "group 'default'");
    EXPECT_HAS(e, "rank 0 entered #101 all_reduce SUM of float32 [20, 10], 'gradients'");
    EXPECT_HAS(e, "rank 1 entered #101 reduce SUM of float32 [20, 10], root 1");
    EXPECT_HAS(e, "they differ in operation");
  }
  EXPECT_EQ(errors[0], errors[1]);  // one record
}

TEST_F(Mismatch, T_27_ReachesRanksThatDoNotSeeIt) {
  // Ranks 0 and 1 agree on the broadcast; rank 2 is in a barrier with all.
  const auto errors = errors_of(4, [](int rank) {
    Tensor x = full({1000}, 1);
    if (rank == 2)
      barrier();
    else
      broadcast(x, 0);
    barrier();
    barrier();
  });
  for (const auto& e : errors) {
    EXPECT_HAS(e, "ranks are in different collectives");
    EXPECT_HAS(e, "rank 2 entered #1 barrier");
  }
}

struct Difference {
  const char* name;
  std::function<void(int rank)> f;
  const char* text;
};
class Differences : public OverBackend, public testing::WithParamInterface<Difference> {};

TEST_P(Differences, O_012_T_27_AreNamedOnEveryRank) {
  // In collectives with a root, ranks other than the root see what is wrong in the next call.
  const auto errors = errors_of(3, [](int rank) {
    GetParam().f(rank);
    barrier();
  });
  for (const auto& e : errors) {
    EXPECT_HAS(e, "#1 ");
    EXPECT_HAS(e, GetParam().text);
  }
}
INSTANTIATE_TEST_SUITE_P(
    All, Differences,
    testing::Values(
        Difference{"shape",
                   [](int r) {
                     all_reduce(zeros({r == 1 ? 3 : 2, 2}));
                   },
                   "shape"},
        Difference{"shape_of_equal_size",
                   [](int r) {
                     all_reduce(r == 1 ? zeros({3, 2}) : zeros({2, 3}));
                   },
                   "shape"},
        Difference{"dtype", [](int r) { all_reduce(zeros({2}, r == 1 ? kInt32 : kFloat32)); },
                   "dtype"},
        Difference{"root", [](int r) { broadcast(zeros({2}), r == 2 ? 1 : 0); }, "root"},
        Difference{"op",
                   [](int r) { all_reduce(zeros({2}), r == 1 ? ReduceOp::kMax : ReduceOp::kSum); },
                   "reduce op"},
        Difference{
            "label",
            [](int r) { all_reduce(zeros({2}), ReduceOp::kSum, {.label = r == 1 ? "b" : "a"}); },
            "label"},
        Difference{"long_label",
                   [](int r) {
                     const std::string common(200, 'x');
                     all_reduce(zeros({2}), ReduceOp::kSum,
                                {.label = common + (r == 1 ? "b" : "a")});
                   },
                   "label"},
        Difference{"all_gather_size",
                   [](int r) {
                     // Rank 1 sends 3 elements, and the others expect 2 from it.
                     std::vector<Tensor> out{zeros({2}), zeros({r == 1 ? 3 : 2}), zeros({2})};
                     all_gather(out, zeros({r == 1 ? 3 : 2}));
                   },
                   "element count"},
        Difference{"scatter_size",
                   [](int r) {
                     std::vector<Tensor> in;
                     if (r == 0) in = {zeros({1}), zeros({1}), zeros({1})};
                     scatter(zeros({r == 2 ? 2 : 1}), in, 0);
                   },
                   "element count"},
        Difference{"reduce_scatter_size",
                   [](int r) {
                     const int64_t n = r == 0 ? 5 : 4;
                     reduce_scatter(zeros({r == 1 ? 4 : n}),
                                    {zeros({n}), zeros({4}), zeros({r == 2 ? n : 4})});
                   },
                   "element count"},
        Difference{"many_bytes", [](int r) { all_reduce(zeros({r == 1 ? 3000000 : 2000000})); },
                   "shape"},
        Difference{"pieces",
                   [](int r) {
                     const int64_t n = r == 1 ? 200000 : 100000;
                     default_group()->all_gather_pieces({zeros({3 * n})}, {zeros({n})}).wait();
                   },
                   "shape"}),
    [](const auto& info) { return info.param.name; });

TEST_F(Failed, GroupThrowsTheFirstCauseAtOnce) {
  run_over_it(2, [&](int rank) {
    std::atomic<int> started = 0, ended = 0;
    const Group pair = new_group({0, 1});
    CollectiveOptions options;
    options.on_start = [&] { ++started; };
    options.on_end = [&] { ++ended; };
    Tensor x = zeros({8});
    rank == 0 ? pair->all_reduce(x) : pair->broadcast(x, 0);
    std::vector<Work> queued;
    std::string late;
    for (int i = 0; i < 5; ++i) late = error_of([&] { queued.push_back(pair->barrier(options)); });
    for (const Work& w : queued) EXPECT_HAS(error_of([&] { w.wait(); }), "different collectives");
    const auto start = Clock::now();
    for (auto call : {std::function<void()>([&] { pair->barrier(); }),
                      std::function<void()>([&] { pair->all_reduce(x); }),
                      std::function<void()>([&] { pair->send(x, 1 - rank); })}) {
      const std::string e = error_of(call);
      EXPECT_HAS(e, "failed before");
      EXPECT_HAS(e, "different collectives");
    }
    EXPECT_LT(Clock::now() - start, milliseconds(2000));
    all_reduce(x);                         // another group is well
    EXPECT_EQ(started, 0);                 // nothing that was queued behind the failure was begun,
    EXPECT_EQ(ended, int(queued.size()));  // and what was accepted was ended
  });
}

TEST_F(Failed, OnStartThatThrowsIsTheGroupsFailure) {
  const auto errors = errors_of(2, [](int rank) {
    CollectiveOptions options;
    if (rank == 1) options.on_start = [] { fail("[allocate] no bytes"); };
    default_group()->all_reduce(zeros({4}), ReduceOp::kSum, options).wait();
  });
  for (const auto& e : errors)
    EXPECT_HAS(e, "rank 1 failed in #1 all_reduce SUM of float32 [4]: [allocate] no bytes");
}

TEST_F(Deadline, O_011_T_27_SaysWhoArrivedAndWhereTheOthersAre) {
  const auto start = Clock::now();
  const auto errors = errors_of(4, [](int rank) {
    Tensor x = zeros({5});
    barrier({.timeout = std::chrono::seconds(10), .label = "all set"});
    // Misses one, and is told when it comes back.
    if (rank == 1) std::this_thread::sleep_for(milliseconds(1500));
    all_reduce(x, ReduceOp::kSum, {.timeout = milliseconds(600)});
  });
  EXPECT_LT(Clock::now() - start, milliseconds(over_mpi() ? 30000 : 10000));
  for (const auto& e : errors) {
    EXPECT_HAS(e, "waited 600 ms in #2 all_reduce SUM of float32 [5]");
    EXPECT_HAS(e, "Arrived: ranks 0, 2, 3");
    EXPECT_HAS(e, "Did not arrive: rank 1 has entered nothing since #1 barrier, 'all set'");
  }
}

// ---- T-27, O-011: each rank writes down what it did last

std::vector<std::string> flight_records(const std::string& folder) {
  std::vector<std::string> texts;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path());
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::sort(texts.begin(), texts.end());
  return texts;
}

TEST_F(Deadline, T_27_O_011_leaves_a_flight_record_a_rank) {
  std::string folder = testing::TempDir() + "flightXXXXXX";
  ASSERT_TRUE(mkdtemp(folder.data()));
  const auto results = run_processes(
      3,
      [&](int rank) {
        setenv("SHERD_FLIGHT_RECORD", folder.c_str(), 1);
        Tensor x = zeros({2, 3});
        for (int i = 0; i < 100; ++i) barrier();
        const Group g = default_group();
        const Work a = g->all_reduce(x, ReduceOp::kSum);
        a.wait();
        if (rank == 1) {  // where it is, is for the record to say
          std::this_thread::sleep_for(milliseconds(1500));
          return;
        }
        const Work b = g->all_reduce(x, ReduceOp::kMax, {.label = "weights"});
        // Rank 2 comes this far, and waits longer.
        const Work c = g->all_reduce(x, ReduceOp::kSum, {.timeout = milliseconds(5000)});
        c.wait();
      },
      {.timeout = milliseconds(600), .may_fail = true});
  EXPECT_EQ(results[0].exit_code, 1);
  const auto records = flight_records(folder);
  ASSERT_EQ(records.size(), 3u);
  for (int rank : {0, 1, 2}) {
    EXPECT_HAS(records[rank], concat("group 'default', rank ", rank, " of 3"));
    EXPECT_HAS(records[rank], "waited 600 ms in #102 all_reduce MAX of float32 [2, 3], 'weights'");
    EXPECT_HAS(records[rank], "Did not arrive: rank 1 has entered nothing since #101 all_reduce");
    EXPECT_FALSE(has(records[rank], " #30 ")) << "not the last 64";
    EXPECT_HAS(records[rank], "#90 barrier");
    EXPECT_HAS(records[rank], "#101 all_reduce SUM of float32 [2, 3]");
    EXPECT_EQ(has(records[rank], "    103  "), rank != 1) << records[rank];
    EXPECT_HAS(results[rank].output,
               concat("[flight_record] the last collectives of rank ", rank, " in group"));
  }
  EXPECT_HAS(records[0], "    102  failed");
  EXPECT_HAS(records[0], "    103  queued");
  EXPECT_HAS(records[1], "    101  done");
  std::filesystem::remove_all(folder);
}

// ---- T-27, O-010: SHERD_DEBUG=collectives compares all ranks' tags before each

TEST_F(Debug, T_27_mismatch_is_seen_by_all_in_that_call) {
  setenv("SHERD_DEBUG", "collectives", 1);
  const auto start = Clock::now();
  const auto errors = errors_of(4, [](int rank) {
    Tensor x = full({20, 10}, 1);
    for (int i = 0; i < 10; ++i) broadcast(x, i % 4), reduce(x, i % 4);
    // Ranks 1 and 2 send to and hear from the root alone: without the check they would see nothing
    // here.
    broadcast(x, rank == 3 ? 1 : 0);
  });
  unsetenv("SHERD_DEBUG");
  EXPECT_LT(Clock::now() - start, milliseconds(over_mpi() ? 30000 : 8000));
  for (const auto& e : errors) {
    EXPECT_HAS(e, "ranks are in different collectives");
    EXPECT_HAS(e, "#21 broadcast of float32 [20, 10], root 0");
    EXPECT_HAS(e, "rank 3 entered #21 broadcast of float32 [20, 10], root 1");
    EXPECT_HAS(e, "they differ in root");
  }
}

TEST_F(Debug, T_27_results_are_the_same) {
  for (const char* debug : {"", "collectives"}) {
    setenv("SHERD_DEBUG", debug, 1);
    run_over_it(3, [](int rank) {
      Tensor x = full({1000}, rank + 1);
      all_reduce(x);
      EXPECT_EQ(x.data<float>()[999], 6);
      broadcast(x, 1);
      reduce(x, 2);
      std::vector<Tensor> in;
      if (rank == 1) in = {zeros({1}), full({2}, 1), full({3}, 2)};
      Tensor out = full({rank + 1}, 9);
      scatter(out, in, 1);
      EXPECT_EQ(out.data<float>()[rank], rank);
      std::vector<Tensor> all{zeros({1}), zeros({2}), zeros({3})};
      gather(rank == 0 ? all : std::vector<Tensor>(), out, 0);
      if (rank == 0) {
        EXPECT_EQ(all[2].data<float>()[2], 2);
      }
      barrier();
    });
  }
  unsetenv("SHERD_DEBUG");
}

TEST_F(Debug, T_31_an_unknown_word_is_refused) {
  setenv("SHERD_DEBUG", "collectives,everything", 1);
  const std::string e = error_of([] { run_over_it(2, [](int) {}); });
  unsetenv("SHERD_DEBUG");
  EXPECT_HAS(e, "SHERD_DEBUG has 'everything': there is collectives");
}

// ---- O-012: an argument that one rank alone gets wrong

const std::vector<Difference> kRefusals = {
    {"reduce_scatter_size",
     [](int r) { reduce_scatter_tensor(zeros({4}), zeros({r == 1 ? 9 : 12})); },
     "[reduce_scatter_tensor] input has shape [9] and output [4]: should be 3 times"},
    {"list_length",
     [](int r) {
       std::vector<Tensor> outputs{zeros({4}), zeros({4})};
       if (r != 1) outputs.push_back(zeros({4}));
       all_gather(outputs, zeros({4}));
     },
     "[all_gather] got 2 outputs, should be 3: one a rank"},
    {"root", [](int r) { broadcast(zeros({2}), r == 1 ? 3 : 0); },
     "[broadcast] root 3 is no rank of group 'default'"},
    {"op", [](int r) { all_reduce(zeros({2}), r == 1 ? ReduceOp::kBor : ReduceOp::kSum); },
     "[all_reduce] BOR of float32 is not defined"}};
class Refused : public testing::Test {
 protected:
  void SetUp() override {
    if (over_mpi()) GTEST_SKIP() << "ranks are threads here: MPI has none";
  }
};
class Refusals : public Refused, public testing::WithParamInterface<Difference> {};
INSTANTIATE_TEST_SUITE_P(All, Refusals, testing::ValuesIn(kRefusals),
                         [](const auto& info) { return info.param.name; });

// The rank ends with its error, and the others know why.
TEST_P(Refusals, O_012_ReachTheOthersWithTheReason) {
  std::string text;
  try {
    run_ranks(3, [](int rank) {
      barrier();
      GetParam().f(rank);
      barrier();
    });
  } catch (const Error& e) {
    text = e.what();
  }
  EXPECT_EQ(text.find(concat("rank 1: ", GetParam().text)), 0u) << text;
  for (int r : {0, 2}) EXPECT_HAS(text, concat("rank ", r, ": group 'default': rank 1 left"));
  EXPECT_HAS(text, concat("before, it was refused call #2: ", GetParam().text));
}

// A rank that goes on is not said to have been refused what it makes good.
TEST_F(Refused, O_012_WhatWasMadeGoodIsForgotten) {
  std::string text;
  try {
    run_ranks(2, [](int rank) {
      if (rank == 1) {
        EXPECT_THROW(broadcast(zeros({2}), 7), Error);
      }
      barrier();
      barrier();
      if (rank == 1) fail("out of data");
      barrier();
    });
  } catch (const Error& e) {
    text = e.what();
  }
  EXPECT_HAS(text, "rank 1 left");
  EXPECT_FALSE(has(text, "refused")) << text;
}

TEST_F(Refused, O_012_IsInTheReportOfADeadline) {
  std::vector<std::string> errors(2);
  run_ranks(2,
            [&](int rank) {
              if (rank == 1) {
                EXPECT_THROW(broadcast(zeros({2}), 7), Error);
                std::this_thread::sleep_for(milliseconds(1200));
              }
              errors[rank] = error_of([] { broadcast(zeros({2}), 0); });
            },
            {.timeout = milliseconds(500)});
  for (auto& e : errors)
    EXPECT_HAS(e,
               "rank 1 has entered no collective yet; before, it was refused call #1: "
               "[broadcast] root 7 is no rank");
}

TEST_P(Refusals, O_012_EndTheGroupOnAllRanksInDebugMode) {
  setenv("SHERD_DEBUG", "collectives", 1);
  const auto start = Clock::now();
  const auto errors = errors_of(3, [](int rank) {
    barrier();
    GetParam().f(rank);
    if (rank != 1) barrier();
  });
  unsetenv("SHERD_DEBUG");
  EXPECT_LT(Clock::now() - start, milliseconds(8000));
  EXPECT_EQ(errors[1].find(GetParam().text), 0u) << errors[1];
  for (int r : {0, 2})
    EXPECT_HAS(errors[r], concat("rank 1 was refused call #2: ", GetParam().text));
}

TEST_F(Deadline, O_017_OfOneCallAlone) {
  const auto start = Clock::now();
  const auto errors = errors_of(2, [](int rank) {
    if (rank == 0) barrier({.timeout = milliseconds(200)});
    std::this_thread::sleep_for(milliseconds(700));
  });
  EXPECT_HAS(errors[0], "waited 200 ms in #1 barrier");
  EXPECT_HAS(errors[0], "rank 1 has entered no collective yet");
  EXPECT_LT(Clock::now() - start, milliseconds(over_mpi() ? 30000 : 9000));
}

TEST_F(Deadline, OfASubgroupNamesGlobalRanks) {
  const auto errors = errors_of(3, [](int rank) {
    const Group g = new_group({2, 1});
    std::exception_ptr error;
    if (rank == 2) try {
        broadcast(zeros({1}), 1, {.group = g, .timeout = milliseconds(300)});
      } catch (...) {
        error = std::current_exception();
      }
    std::this_thread::sleep_for(milliseconds(100));
    barrier();
    if (error) std::rethrow_exception(error);
  });
  EXPECT_HAS(errors[2], "group 'group1'");
  EXPECT_HAS(errors[2], "Arrived: rank 2. Did not arrive: rank 1");
}

TEST_F(Peer, T_26_KilledWhileOthersWait) {
  const auto start = Clock::now();
  const auto results = run_processes(3,
                                     [](int rank) {
                                       Tensor x = full({300000}, 1);
                                       for (int i = 0;; ++i) {
                                         if (rank == 1 && i == 20) raise(SIGKILL);
                                         all_reduce(x);
                                       }
                                     },
                                     {.may_fail = true});
  EXPECT_LT(Clock::now() - start, milliseconds(over_mpi() ? 40000 : 15000));
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (int r : {0, 2}) {
    EXPECT_EQ(results[r].exit_code, 1);
    // "rank 1 left", or "ranks 0, 1 left" where rank 0 had given up by then.
    EXPECT_HAS(results[r].output, "1 left");
    EXPECT_HAS(results[r].output, "all_reduce SUM of float32 [300000]");
    EXPECT_HAS(results[r].output, "#21 ");
  }
}

TEST_F(Peer, KilledRankThatServesTheStore) {
  const auto results = run_processes(3,
                                     [](int rank) {
                                       Tensor x = full({1000}, 1);
                                       for (int i = 0;; ++i) {
                                         if (rank == 0 && i == 20) raise(SIGKILL);
                                         all_reduce(x);
                                       }
                                     },
                                     {.may_fail = true});
  EXPECT_EQ(results[0].signal, SIGKILL);
  for (int r : {1, 2}) {
    EXPECT_EQ(results[r].exit_code, 1);
    EXPECT_HAS(results[r].output, "left (ended, was killed");
    EXPECT_HAS(results[r].output, "all_reduce");
  }
}

TEST_F(Peer, StoppedIsReportedAsSilent) {
  const auto results =
      run_processes(2,
                    [](int rank) {
                      barrier();
                      if (rank == 1) raise(SIGSTOP);
                      if (rank == 0) barrier({.timeout = milliseconds(500)});
                    },
                    {.kill_after = milliseconds(over_mpi() ? 10000 : 3000), .may_fail = true});
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_HAS(results[0].output, "rank 1 does not answer");
}

TEST_F(Peer, T_26_ThatThrowsEndsTheOthers) {
  if (over_mpi()) GTEST_SKIP() << "of threads: what run_ranks throws";
  std::string text;
  try {
    run_ranks(3, [](int rank) {
      barrier();
      if (rank == 2) fail("out of data");
      barrier();
    });
  } catch (const Error& e) {
    text = e.what();
  }
  EXPECT_EQ(text.find("rank 2: out of data"), 0u) << text;
  EXPECT_HAS(text, "rank 0: group 'default': rank 2 left");
  EXPECT_HAS(text, "while rank ");
}

TEST_F(Peer, ThatDestroysEarlyIsNamed) {
  const auto errors = errors_of(2, [](int rank) {
    barrier();
    if (rank == 1) return;
    std::this_thread::sleep_for(milliseconds(100));
    all_reduce(zeros({3}));
  });
  EXPECT_HAS(errors[0],
             "rank 1 left it after #1 (destroy_process_group), and rank 0 entered #2 all_reduce");
}

TEST_F(Peer, IsMissedByAnIdleRank) {
  const auto results = run_processes(2,
                                     [](int rank) {
                                       barrier();
                                       if (rank == 1) raise(SIGKILL);
                                       std::this_thread::sleep_for(milliseconds(1500));
                                       const auto start = Clock::now();
                                       const std::string e = error_of([] { barrier(); });
                                       EXPECT_HAS(e, "rank 1 left");
                                       EXPECT_HAS(e, "idle after #1 barrier");
                                       EXPECT_LT(Clock::now() - start, milliseconds(1000));
                                     },
                                     {.may_fail = true});
  EXPECT_TRUE(results[0].ok()) << results[0].output;
}

TEST_F(PointToPoint, T_27_IsInTheFlightRecord) {
  std::string folder = testing::TempDir() + "flightXXXXXX";
  ASSERT_TRUE(mkdtemp(folder.data()));
  const auto results = run_processes(2,
                                     [&](int rank) {
                                       setenv("SHERD_FLIGHT_RECORD", folder.c_str(), 1);
                                       Tensor x = zeros({2, 3});
                                       for (int i = 0; i < 100; ++i)
                                         rank == 0 ? send(x, 1, i) : void(recv(x, 0, i));
                                       if (rank == 0)
                                         send(x, 1, 1000, {.timeout = milliseconds(300)});
                                       std::this_thread::sleep_for(milliseconds(1000));
                                       recv(x, 0, 7);
                                     },
                                     {.may_fail = true});
  const auto records = flight_records(folder);
  ASSERT_EQ(records.size(), 2u) << results[0].output << results[1].output;
  for (int rank : {0, 1}) {
    EXPECT_HAS(records[rank],
               "rank 0 in send to rank 1, tag 1000, of float32 [2, 3]: no call that matches");
    EXPECT_HAS(records[rank], "no collective was issued");
    EXPECT_FALSE(has(records[rank], "     30  ")) << "not the last 64";
    EXPECT_HAS(records[rank], "     99  done");
    EXPECT_HAS(records[rank], rank == 0 ? "send to rank 1, tag 99, of float32 [2, 3]"
                                        : "recv from rank 0, tag 99, of float32 [2, 3]");
  }
  EXPECT_HAS(records[0], "    100  queued");
  std::filesystem::remove_all(folder);
}

TEST_F(PointToPoint, Faults) {
  auto errors = errors_of(2, [](int rank) {  // sizes
    rank == 0 ? send(zeros({3}), 1) : void(recv(zeros({2}), 0));
  });
  for (const auto& e : errors)
    EXPECT_HAS(e, "rank 0 sent float32 [3] with tag 0, and rank 1 expects float32 [2]");

  errors = errors_of(2, [](int rank) {  // nobody sends
    if (rank == 1) irecv(zeros({2}), 0, 7, {.timeout = milliseconds(300)}).wait();
    if (rank == 0) std::this_thread::sleep_for(milliseconds(1000));
  });
  EXPECT_HAS(errors[1],
             "recv from rank 0, tag 7, of float32 [2]: no call that matches came in time");

  const auto start = Clock::now();
  try {
    run_over_it(3, [](int rank) {  // the peer leaves
      barrier();
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(200));  // the others are through the barrier
        fail("tired");
      }
      const std::string lost = error_of([&] { recv(zeros({2}), rank == 0 ? 1 : -1); });
      EXPECT_HAS(lost, "rank 2 left");
      if (over_mpi()) _exit(testing::Test::HasFailure());  // MPI_Finalize would wait for rank 2
    });
    ADD_FAILURE() << "rank 2 threw";
  } catch (const Error& thrown) {
    if (over_mpi())
      EXPECT_STREQ(thrown.what(), "rank 2: exit code 1, said: tired\n");
    else
      EXPECT_STREQ(thrown.what(), "rank 2: tired");
  }
  EXPECT_LT(Clock::now() - start, milliseconds(over_mpi() ? 30000 : 9000));
}

}  // namespace
}  // namespace sherd::dist
