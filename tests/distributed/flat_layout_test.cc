#include "distributed/flat_layout.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

namespace sherd::dist {
namespace {

FlatParameter parameter(std::string name, Dims shape, DType dtype = kFloat32, bool trained = true) {
  return {{std::move(name)}, shape, dtype, trained};
}

// Each element of each parameter gets a number of its own; a piece holds -1 where it is padding.
std::vector<std::vector<int64_t>> cut(const FlatLayout& g, const std::vector<int64_t>& first) {
  std::vector<std::vector<int64_t>> pieces(g.shards(), std::vector<int64_t>(g.piece(), -1));
  for (int rank = 0; rank < g.shards(); ++rank)
    for (int e = 0; e < int(g.entries().size()); ++e) {
      const OwnedPart p = g.owned(e, rank);
      for (int64_t i = p.lo; i < p.hi; ++i)
        pieces[rank].at(p.at + i - p.lo) = first[g.entries()[e].parameter] + i;
    }
  return pieces;
}

// The claims of [Note: flat layout], for any parameters.
void check(const std::vector<FlatParameter>& parameters, int shards) {
  const UnitLayout unit(parameters, shards);
  std::vector<int64_t> first(parameters.size());
  for (size_t i = 1; i < parameters.size(); ++i)
    first[i] = first[i - 1] + parameters[i - 1].shape.numel();
  ASSERT_EQ(unit.places().size(), parameters.size());

  size_t listed = 0;
  for (const FlatLayout& g : unit.groups()) {
    listed += g.entries().size();
    EXPECT_EQ(g.piece(), (g.numel() + shards - 1) / shards);  // Z-005
    EXPECT_EQ(g.padded(), g.piece() * shards);
    EXPECT_LT(g.padded() - g.numel(), shards);
    int64_t at = 0, owned = 0;
    for (size_t e = 0; e < g.entries().size(); ++e) {
      const FlatLayout::Entry& entry = g.entries()[e];
      EXPECT_EQ(entry.offset, at) << "nothing lies between parameters";
      at += entry.numel;
      if (!entry.numel) continue;
      const int64_t v = std::min<int64_t>(64, entry.numel & -entry.numel);
      EXPECT_EQ(entry.offset % v, 0) << "numel " << entry.numel;
      for (int rank = 0; rank < shards; ++rank) owned += g.owned(int(e), rank).numel();
    }
    EXPECT_EQ(at, g.numel());
    EXPECT_EQ(owned, g.numel()) << "each element has one owner";

    // Joined in order of rank, without the padding, the pieces are the flat buffer (I-011).
    std::vector<int64_t> joined, flat;
    for (const auto& piece : cut(g, first)) joined.insert(joined.end(), piece.begin(), piece.end());
    for (const auto& entry : g.entries())
      for (int64_t i = 0; i < entry.numel; ++i) flat.push_back(first[entry.parameter] + i);
    flat.resize(joined.size(), -1);
    EXPECT_EQ(joined, flat);
  }
  EXPECT_EQ(listed, parameters.size());

  for (int i = 0; i < int(parameters.size()); ++i) {
    const auto [g, e] = unit.places()[i];
    EXPECT_EQ(unit.groups()[g].entries()[e].parameter, i);
    EXPECT_EQ(unit.groups()[g].entries()[e].numel, parameters[i].shape.numel());
    EXPECT_EQ(unit.groups()[g].dtype(), parameters[i].dtype);
    EXPECT_EQ(unit.groups()[g].requires_grad(), parameters[i].requires_grad);
    for (int rank = 0; rank < shards; ++rank)
      EXPECT_EQ(unit.owned(i, rank), unit.groups()[g].owned(e, rank));
  }
}

TEST(FlatLayout, RandomUnits) {
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    std::vector<FlatParameter> parameters;
    const int n = random() % 9;
    for (int i = 0; i < n; ++i) {
      Dims shape;
      for (int d = random() % 4; d > 0; --d) {
        const int64_t sizes[] = {0, 1, 2, 3, 5, 8, 12, 17, 64};
        shape.push(sizes[random() % 9]);
      }
      parameters.push_back(
          parameter(concat("p", i), shape, random() % 4 ? kFloat32 : kFloat64, random() % 3 != 0));
    }
    check(parameters, 1 + random() % 9);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(FlatLayout, OrderIsByTrailingZeroBitsThenByModule) {
  const std::vector<FlatParameter> parameters = {
      parameter("odd", {3}),         parameter("empty", {0, 4}),  parameter("even", {3, 2}),
      parameter("weight", {64, 64}), parameter("other_odd", {5}), parameter("bias", {128}),
      parameter("scalar", {}),       parameter("half", {32, 3}),
  };
  const UnitLayout unit(parameters, 4);
  ASSERT_EQ(unit.groups().size(), 1);
  std::vector<std::string> order;
  for (const auto& e : unit.groups()[0].entries())
    order.push_back(parameters[e.parameter].names[0]);
  // 64 divides both weight and bias: then the module's order counts.
  EXPECT_EQ(order, (std::vector<std::string>{"weight", "bias", "half", "even", "odd", "other_odd",
                                             "scalar", "empty"}));
  check(parameters, 4);
}

TEST(FlatLayout, AWeightWithRowsOfEightStarts16BytesAlignedInBfloat16) {
  const std::vector<FlatParameter> parameters = {parameter("a", {7}), parameter("b", {9, 8}),
                                                 parameter("c", {11, 24}), parameter("d", {1})};
  const UnitLayout unit(parameters, 3);
  for (int i : {1, 2}) {
    const auto [g, e] = unit.places()[i];
    EXPECT_EQ(unit.groups()[g].entries()[e].offset * size_of(kBFloat16) % 16, 0);
  }
}

TEST(FlatLayout, GroupsInOrderOfFirstAppearance) {
  const UnitLayout unit(
      std::vector{parameter("a", {4}, kFloat32, false), parameter("b", {4}, kFloat64),
                  parameter("c", {4}, kFloat32, true), parameter("d", {4}, kFloat32, false)},
      2);
  ASSERT_EQ(unit.groups().size(), 3);
  EXPECT_FALSE(unit.groups()[0].requires_grad());
  EXPECT_EQ(unit.groups()[0].numel(), 8);
  EXPECT_EQ(unit.groups()[1].dtype(), kFloat64);
  EXPECT_TRUE(unit.groups()[2].requires_grad());
}

TEST(FlatLayout, OutputsThatDoNotDivide) {
  // F-002: some ranks own nothing of a bias.
  for (int shards : {2, 4, 8})
    check({parameter("0.weight", {15, 7}), parameter("0.bias", {15}),
           parameter("2.weight", {3, 15}), parameter("2.bias", {3})},
          shards);
  const FlatLayout g = UnitLayout(std::vector{parameter("bias", {3})}, 8).groups()[0];
  EXPECT_EQ(g.piece(), 1);
  EXPECT_EQ(g.owned(0, 2), (OwnedPart{2, 3, 0}));
  for (int rank = 3; rank < 8; ++rank) EXPECT_EQ(g.owned(0, rank), OwnedPart{});
}

TEST(FlatLayout, WithoutParametersOrElements) {
  EXPECT_TRUE(UnitLayout({}, 4).groups().empty());
  const UnitLayout unit(std::vector{parameter("empty", {0})}, 4);
  EXPECT_EQ(unit.groups()[0].piece(), 0);
  EXPECT_EQ(unit.groups()[0].padded(), 0);
  EXPECT_EQ(unit.owned(0, 3), OwnedPart{});
}

TEST(FlatLayout, OneRankOwnsAllInPlace) {
  const UnitLayout unit(std::vector{parameter("a", {5}), parameter("b", {8})}, 1);
  EXPECT_EQ(unit.groups()[0].padded(), 13);
  EXPECT_EQ(unit.owned(0, 0), (OwnedPart{0, 5, 8}));
  EXPECT_EQ(unit.owned(1, 0), (OwnedPart{0, 8, 0}));
}

TEST(FlatLayout, RefusesBadShardsAndRanks) {
  EXPECT_THROW(UnitLayout(std::vector{parameter("a", {5})}, 0), Error);
  const UnitLayout unit(std::vector{parameter("a", {5})}, 2);
  EXPECT_THROW(unit.owned(0, 2), Error);
  EXPECT_THROW(unit.owned(0, -1), Error);
}

}  // namespace
}  // namespace sherd::dist
