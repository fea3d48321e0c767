// The collectives example prints what each rank has; here it is worked out again by hand.
#include <gtest/gtest.h>

#include <map>

#include "core/error.h"
#include "tests/examples/start.h"

namespace examples {
namespace {

using sherd::concat;
using sherd::dist::Result;

// Title -> what ranks 0, 1, ... have in the end.
using Shown = std::map<std::string, std::vector<std::string>>;

Shown show(Start how, int ranks, const std::vector<std::string>& flags = {}) {
  const Result r = run(start(how, ranks, "examples/collectives", flags));
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  Shown shown;
  std::string title;
  for (const std::string& line : plain_lines(r.out)) {
    const size_t has = line.find("  has ");
    if (has == std::string::npos) {
      title = line;
    } else {
      EXPECT_EQ(line.find("  rank " + std::to_string(shown[title].size()) + "  had "), 0u) << line;
      shown[title].push_back(line.substr(has + 6));
    }
  }
  return shown;
}

std::string list(const std::vector<int64_t>& values) {
  std::string s = "[";
  for (int64_t v : values) s += (s.size() > 1 ? " " : "") + std::to_string(v);
  return s + "]";
}

// What the example computes with: rank r has 10 r, 10 r + 1, ...
Shown expected(int n) {
  Shown e;
  int64_t sum = 0, product0 = 1, product1 = 1;
  std::string gathered;
  std::vector<int64_t> flat, all;
  for (int r = 0; r < n; ++r) {
    sum += 10 * r, product0 *= 10 * r, product1 *= 10 * r + 1;
    gathered += (r ? " " : "") + list({10 * r, 10 * r + 1});
    flat.insert(flat.end(), {10 * r, 10 * r + 1});
  }
  int64_t even = 0;
  for (int r = 0; r < n; r += 2) even += 10 * r;
  const int last = 10 * (n - 1);
  for (int r = 0; r < n; ++r) {
    const std::string own = list({10 * r, 10 * r + 1});
    e["broadcast from rank 0"].push_back("[0 1]");
    e["scatter from rank 0"].push_back(list({r}));
    e["reduce to rank 0"].push_back(r == 0 ? list({sum, sum + n}) : own);
    e["gather to rank 0"].push_back(r == 0 ? gathered : "nothing");
    e["all_reduce SUM"].push_back(list({sum, sum + n}));
    e["all_reduce PRODUCT"].push_back(list({product0, product1}));
    e["all_reduce MIN"].push_back("[0 1]");
    e["all_reduce MAX"].push_back(list({last, last + 1}));
    e["all_reduce AVG"].push_back(list({sum / n, sum / n + 1}));
    e["all_gather"].push_back(gathered);
    e["all_gather_into_tensor"].push_back(list(flat));
    e["reduce_scatter"].push_back(list({sum + n * r}));
    e["reduce_scatter_tensor"].push_back(list({sum + n * r}));
    std::string from_each;
    std::vector<int64_t> single;
    for (int s = 0; s < n; ++s) {
      from_each += (s ? " " : "") + list({10 * s + r});
      for (int i = 0; i <= s; ++i) single.push_back(10 * s + r * (s + 1) + i);
    }
    e["all_to_all"].push_back(from_each);
    e["all_to_all_single"].push_back(list(single));
    e["barrier"].push_back("nothing");
    if (n == 1) {
      e["send, recv"].push_back("nothing");
    } else {
      const int next = (r + 1) % n, previous = (r + n - 1) % n;
      e["send to the next, recv"].push_back(list({10 * previous, 10 * previous + 1}));
      e["isend to the previous, irecv"].push_back(list({10 * next, 10 * next + 1}));
    }
    e["two all_reduce, async"].push_back(list({sum, sum + n}) + " " + list({last, last + 1}) +
                                         " completed");
    e["all_reduce of the even ranks"].push_back(r % 2 == 0 ? list({even, even + (n + 1) / 2})
                                                           : own);
  }
  return e;
}

TEST(Collectives, AreWhatTheySay) {
  for (int ranks : {1, 2, 3, 4}) EXPECT_EQ(show(Start::kItself, ranks), expected(ranks)) << ranks;
}

TEST(Collectives, StartUnderLaunchers) {
  for (Start how : {Start::kSherdrun, Start::kMpirun})
    EXPECT_EQ(show(how, 4), expected(4)) << name_of(how);
}

TEST(Collectives, OverMpi) {
  if (!sherd::dist::has_mpirun()) GTEST_SKIP() << "mpirun is not installed";
  EXPECT_EQ(show(Start::kItself, 3, {"--backend=mpi"}), expected(3));
  EXPECT_EQ(show(Start::kMpirun, 2, {"--backend=mpi"}), expected(2));
  setenv("SHERD_BACKEND", "mpi", 1);
  EXPECT_EQ(show(Start::kSherdrun, 4), expected(4));
  unsetenv("SHERD_BACKEND");
  // mpirun's own jobs over the others.
  for (const char* backend : {"shm", "gloo"})
    EXPECT_EQ(show(Start::kMpirun, 2, {concat("--backend=", backend)}), expected(2)) << backend;
  // It did not start these.
  const Result r = run(start(Start::kSherdrun, 2, "examples/collectives", {"--backend=mpi"}));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("it did not start ranks 0, 1: start them by sherdrun --backend=mpi"),
            std::string::npos)
      << r.err;
}

TEST(Collectives, UnknownFlag) {
  const Result r = run({"examples/collectives", "--sum"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(sherd::dist::lines_of(r.err).size(), 1u) << r.err;
}

}  // namespace
}  // namespace examples
