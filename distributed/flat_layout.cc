#include "distributed/flat_layout.h"

#include <algorithm>
#include <bit>

namespace sherd::dist {
namespace {

constexpr int kMaxAlignment = 6;  // 64 elements: a cache line of float32, or four

// Falling order of this value puts multiples of large powers of two first, and nothing last.
int alignment(int64_t numel) {
  return numel == 0 ? -1 : std::min(kMaxAlignment, std::countr_zero(uint64_t(numel)));
}

}  // namespace

FlatLayout::FlatLayout(DType dtype, bool requires_grad, std::vector<Entry> entries, int shards)
    : dtype_(dtype), requires_grad_(requires_grad), entries_(std::move(entries)), shards_(shards) {
  if (shards < 1) fail("[flat_layout] needs at least one rank to shard over, got ", shards);
  std::ranges::stable_sort(entries_, std::greater{},
                           [](const Entry& e) { return alignment(e.numel); });
  for (Entry& e : entries_) {
    e.offset = numel_;
    numel_ += e.numel;
  }
  piece_ = (numel_ + shards - 1) / shards;
}

OwnedPart FlatLayout::owned(int entry, int rank) const {
  if (rank < 0 || rank >= shards_)
    fail("[flat_layout] rank ", rank, " is not one of the ", shards_, " that share the parameters");
  const Entry& e = entries_.at(entry);
  const int64_t begin = rank * piece_;
  const int64_t lo = std::max(e.offset, begin);
  const int64_t hi = std::min(e.offset + e.numel, begin + piece_);
  if (lo >= hi) return {};
  return {lo - e.offset, hi - e.offset, lo - begin};
}

UnitLayout::UnitLayout(std::span<const FlatParameter> parameters, int shards) {
  struct Group {
    DType dtype;
    bool requires_grad;
    std::vector<FlatLayout::Entry> entries;
  };
  std::vector<Group> groups;
  for (int i = 0; i < int(parameters.size()); ++i) {
    const FlatParameter& p = parameters[i];
    auto g = std::ranges::find_if(groups, [&](const Group& g) {
      return g.dtype == p.dtype && g.requires_grad == p.requires_grad;
    });
    if (g == groups.end()) g = groups.insert(groups.end(), {p.dtype, p.requires_grad, {}});
    g->entries.push_back({i, p.shape.numel()});
  }
  places_.resize(parameters.size());
  for (int g = 0; g < int(groups.size()); ++g) {
    groups_.emplace_back(groups[g].dtype, groups[g].requires_grad, std::move(groups[g].entries),
                         shards);
    const auto& entries = groups_.back().entries();
    for (int e = 0; e < int(entries.size()); ++e) places_[entries[e].parameter] = {g, e};
  }
}

OwnedPart UnitLayout::owned(int parameter, int rank) const {
  const Place& p = places_.at(parameter);
  return groups_[p.group].owned(p.entry, rank);
}

}  // namespace sherd::dist
