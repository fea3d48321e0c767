// The index of a sharded checkpoint: which file holds which elements of which tensor, and a
// checksum of every block of every file. Plain numbers: no tensors, no files, no ranks.
//
//     ShardIndex index = ShardIndex::from_json(json::parse(read_file("step-000100/index.json")));
//     for (const ShardIndex::Read& r : index.reads("model.head.weight", 1000, 2000)) ...
//
// A tensor is a run of elements in row-major order, cut into pieces [begin, end) at any places. A
// piece is a run of bytes of one file. So a reader of other pieces, whatever the number of ranks,
// the strategy or the wrapping that wrote them, reads the overlaps of two lists of intervals.
// Blocks of rows and columns are such runs too: runs_of_box.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/dims.h"
#include "core/dtype.h"

namespace sherd::dist {

struct ShardIndex {
  struct Piece {
    int64_t begin, end;  // elements of the flattened tensor
    int file;            // in `files`
    int64_t offset;      // of the first byte, from the beginning of the file
  };
  struct TensorInfo {
    DType dtype;
    Dims shape;
    std::vector<Piece> pieces;  // by begin; together they are the whole
  };
  struct File {
    std::string name;
    int64_t bytes = 0;
    std::vector<uint64_t> checksums = {};  // of each kChecksumBlock bytes
  };
  struct Read {
    int file;
    int64_t offset, bytes;  // in the file
    int64_t begin, end;     // the elements that they are
  };

  std::map<std::string, TensorInfo> tensors;
  std::vector<File> files;

  // Error if there is none of that name.
  const TensorInfo& tensor(const std::string& name) const;
  // What to read for elements [begin, end): each element once, in rising order, neighbours in a
  // file joined.
  std::vector<Read> reads(const std::string& name, int64_t begin, int64_t end) const;
  // Pieces in order, and whole. Error that names the tensor and the elements that nobody has, or
  // that would lie outside of their file.
  void finish();

  nlohmann::json to_json() const;
  // Checks everything: a damaged or malicious index is an Error that names what is wrong.
  static ShardIndex from_json(const nlohmann::json& json);
};

// Runs of elements [begin, end) that the box with corner `start` and sizes `size` has in a
// row-major tensor of that shape, rising, neighbours joined.
std::vector<std::pair<int64_t, int64_t>> runs_of_box(const Dims& shape, const Dims& start,
                                                     const Dims& size);

}  // namespace sherd::dist
