#include "distributed/objects.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using nlohmann::json;

class Objects : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Objects, testing::Values("gloo", "shm"), name_of_backend);

// Of another length on each rank; with bytes of all kinds; nothing on rank 1.
std::string text_of(int rank) {
  std::string s;
  for (int i = 0; rank != 1 && i < 1 + rank * 30000; ++i) s += char(i * 7 + rank);
  return s;
}
// Nested lists of another length on each rank.
json value_of(int rank) {
  json j = {{"rank", rank}, {"half", rank + 0.5}, {"big", int64_t(1) << (40 + rank)}};
  j["nested"] = json::array();
  for (int i = 0; i < rank; ++i) j["nested"].push_back({i, std::string(size_t(i), 'x'), nullptr});
  if (rank == 1) return json::array();
  return j;
}

TEST_P(Objects, O_016_AllGatherAndGather) {
  over_ranks(4, [](int rank) {
    std::vector<std::string> texts(4, "old");
    all_gather_object(texts, text_of(rank));
    std::vector<json> values(4, "old");
    all_gather_object(values, value_of(rank));
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(texts[r], text_of(r));
      EXPECT_EQ(values[r], value_of(r));
    }
    for (int root = 0; root < 4; ++root) {
      std::vector<std::string> some(rank == root ? 4 : 0);
      gather_object(text_of(rank), some, root);
      std::vector<json> others(rank == root ? 4 : 0);
      gather_object(value_of(rank), others, root);
      for (size_t r = 0; r < some.size(); ++r) {
        EXPECT_EQ(some[r], text_of(int(r)));
        EXPECT_EQ(others[r], value_of(int(r)));
      }
    }
  });
}

TEST_P(Objects, O_016_BroadcastAndScatter) {
  over_ranks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      std::vector<std::string> texts{concat("of rank ", rank), "", text_of(rank)};
      broadcast_object_list(texts, root);
      EXPECT_EQ(texts, (std::vector<std::string>{concat("of rank ", root), "", text_of(root)}));
      std::vector<json> values{value_of(rank), rank, nullptr};
      broadcast_object_list(values, root);
      EXPECT_EQ(values, (std::vector<json>{value_of(root), root, nullptr}));
      std::vector<std::string> inputs, out{"old", "stays"};
      std::vector<json> json_inputs, json_out(1);
      for (int r = 0; rank == root && r < 3; ++r) {
        inputs.push_back(text_of(r) + "!");
        json_inputs.push_back({{"for", value_of(r)}});
      }
      scatter_object_list(out, inputs, root);
      EXPECT_EQ(out, (std::vector<std::string>{text_of(rank) + "!", "stays"}));
      scatter_object_list(json_out, json_inputs, root);
      EXPECT_EQ(json_out[0], (json{{"for", value_of(rank)}}));
    }
    std::vector<std::string> all(1), nothing{""};  // of nothing at all
    broadcast_object_list(nothing);
    EXPECT_EQ(nothing[0], "");
    const Group g = new_group({2, 1});
    if (g->rank() >= 0) {
      all.resize(2);
      all_gather_object(all, concat(rank), {.group = g});
      EXPECT_EQ(all, (std::vector<std::string>{"2", "1"}));
    }
  });
}

TEST_P(Objects, O_016_RefusesWrongLists) {
  over_ranks(2, [](int rank) {
    std::vector<std::string> none, one(1), two(2);
    const std::string s = "x";
    EXPECT_HAS(error_of([&] { all_gather_object(none, s); }),
               "[all_gather_object] got 0 places for objects, should be 2: one a rank");
    EXPECT_HAS(error_of([&] { broadcast_object_list(none); }), "got no objects");
    EXPECT_HAS(error_of([&] { scatter_object_list(none, rank == 0 ? two : none); }),
               "got an output list of no elements");
    EXPECT_HAS(error_of([&] { scatter_object_list(one, rank == 0 ? one : two); }),
               rank == 0 ? "should be 2" : "should be 0: the root alone has them");
    EXPECT_HAS(error_of([&] { all_gather_object(two, s, {.async = true}); }), "async");
  });
  // A list that the root alone has wrong: the other waits for it until it leaves.
  over_ranks(2, [](int rank) {
    std::vector<std::string> list(rank == 0 ? 1 : 0);
    const std::string e = error_of([&] { gather_object("x", list); });
    EXPECT_HAS(e, rank == 0 ? "got 1" : "rank 0 left");
  });
  // As many elements on all ranks.
  std::vector<std::string> errors(2);
  over_ranks(2, [&](int rank) {
    std::vector<std::string> list(rank + 1);
    errors[rank] = error_of([&] { broadcast_object_list(list); });
  });
  for (auto& e : errors) EXPECT_HAS(e, "they differ in shape");
}

}  // namespace
}  // namespace sherd::dist
