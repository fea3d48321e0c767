// Ranks for tests.
//
//     run_ranks(2, [](int rank) {                 // threads, each with a Context of its own
//       Tensor x = full({4}, rank + 1.0);
//       dist::all_reduce(x);
//       EXPECT_EQ(x.data<float>()[0], 3);
//     });
//
// The default group is there when the function starts and is destroyed when it returns. What ranks
// throw is thrown on, with the rank in front, the first in time first: "rank 1: ...". Real Gloo
// over 127.0.0.1.
#pragma once
#include <functional>
#include <string>

#include "distributed/distributed.h"

namespace sherd::dist {

struct RankOptions {
  Milliseconds timeout = std::chrono::seconds(20);  // the default group's
  bool init = true;                                 // make and destroy the default group
};

void run_ranks(int ranks, const std::function<void(int rank)>& f, const RankOptions& options = {});

}  // namespace sherd::dist
