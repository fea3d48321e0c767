// FlatLayout: where the parameters of a unit lie in its flat buffers, and which rank owns what.
// Integers only: no tensors, no communication.
//
//     UnitLayout layout(parameters, /*shards=*/4);      // in the order of the module
//     const FlatLayout& group = layout.groups()[0];
//     Tensor full = empty({group.padded()}, group.dtype());
//     OwnedPart part = group.owned(entry, rank);        // elements [lo, hi) of the parameter
//                                                       // lie at piece[part.at]
//
// [Note: flat layout] A unit's parameters form groups by (dtype of the master copy, requires_grad
// when wrapped), in order of first appearance. A group is one flat buffer of n elements, padded
// once at its end to s * c, c = ceil(n / s): rank k of s owns [k c, (k + 1) c). Inside a group
// parameters lie in falling order of v = min(6, trailing zero bits of numel): the sizes of all
// predecessors are multiples of 2^v, so each parameter starts at a multiple of 2^v elements and
// nothing is lost between them. Parameters without elements come last. The order is stable, and
// depends on sizes alone, so all ranks agree on it.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "core/dims.h"
#include "core/dtype.h"

namespace sherd::dist {

struct FlatParameter {
  std::vector<std::string> names;  // several if tied; errors use the first
  Dims shape;
  DType dtype = kFloat32;     // of the master copy
  bool requires_grad = true;  // when wrapped
};

// What one rank holds of one parameter: its elements [lo, hi), which begin at element `at` of the
// rank's piece. lo == hi: nothing (then all are 0).
struct OwnedPart {
  int64_t lo = 0, hi = 0, at = 0;
  int64_t numel() const { return hi - lo; }
  bool operator==(const OwnedPart&) const = default;
};

class FlatLayout {
 public:
  struct Entry {
    int parameter = 0;  // index in the list that the unit was made from
    int64_t numel = 0;
    int64_t offset = 0;  // in the flat buffer, in elements
  };

  // The entries' parameters in module order; offsets are set here. Error if shards < 1.
  FlatLayout(DType dtype, bool requires_grad, std::vector<Entry> entries, int shards);

  DType dtype() const { return dtype_; }
  bool requires_grad() const { return requires_grad_; }
  int shards() const { return shards_; }
  int64_t numel() const { return numel_; }                        // n
  int64_t piece() const { return piece_; }                        // c
  int64_t padded() const { return piece_ * shards_; }             // s c
  const std::vector<Entry>& entries() const { return entries_; }  // in flat order

  OwnedPart owned(int entry, int rank) const;

 private:
  DType dtype_;
  bool requires_grad_;
  std::vector<Entry> entries_;
  int shards_;
  int64_t numel_ = 0, piece_ = 0;
};

// All groups of one unit.
class UnitLayout {
 public:
  struct Place {
    int group = 0, entry = 0;
  };

  UnitLayout(std::span<const FlatParameter> parameters, int shards);

  const std::vector<FlatLayout>& groups() const { return groups_; }  // empty: nothing to gather
  // By index in the list of parameters, which is the module's order.
  const std::vector<Place>& places() const { return places_; }
  OwnedPart owned(int parameter, int rank) const;

 private:
  std::vector<FlatLayout> groups_;
  std::vector<Place> places_;
};

}  // namespace sherd::dist
