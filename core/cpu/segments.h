// Segments: the memory that the CPU's allocator takes from the system or a BlockSource, in large
// units, and cuts into pieces. A freed piece grows together with its free neighbours, so what one
// phase of a step held as few large tensors serves the next as many small ones. Not thread-safe:
// the allocator's lock is held.
//
//     Segments segments;
//     char* data = segments.take(100'000);             // of a segment of 2 MiB
//     segments.put(data);                              // kept, for whatever fits into it
//     segments.release_free();                         // gone: nothing else of its segment is used
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/block_source.h"

namespace sherd::cpu {

class Segments {
 public:
  Segments() = default;
  ~Segments();  // nobody uses any piece then
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  // `bytes` of the smallest free piece that may serve them, the rest of which stays free; at
  // multiples of 4 KiB. Segments of more than 16 MiB serve requests of an eighth of them and more.
  // What is free goes back first where a new segment would make twice the most that was ever in use
  // and 64 MiB.
  // Null, with errno, if the system has no more, whatever was cached: `bytes`, above 0, are few
  // enough to be rounded up.
  char* take(int64_t bytes);
  void put(char* data);  // allocates nothing
  // Gives segments back in which no piece is used.
  void release_free();
  // New segments come from there; null: from the system. Those of other sources serve no more, and
  // go back as their last piece does.
  void set_source(std::shared_ptr<BlockSource> source);

  int64_t reserved() const { return reserved_; }          // bytes of all segments
  int64_t system_calls() const { return system_calls_; }  // requests, refused ones too

 private:
  using FreePieces = std::set<std::pair<int64_t, char*>>;  // by size
  struct Segment {
    char* data;
    int64_t bytes;
    std::shared_ptr<BlockSource> source;  // null: the system
  };
  struct Piece {
    int64_t bytes;
    const Segment* segment;
    FreePieces::node_type node;  // of a used piece: it goes back with it
    bool is_free() const { return node.empty(); }
    bool is_whole() const { return bytes == segment->bytes; }
  };
  using Pieces = std::map<char*, Piece>;  // by address

  FreePieces::iterator find(int64_t bytes, bool any_segment);
  FreePieces::iterator add_segment(int64_t bytes);  // free_.end(), with errno: there are no more
  void absorb(Pieces::iterator piece, Pieces::iterator next);
  void give_back(Pieces::iterator whole);

  std::shared_ptr<BlockSource> source_;
  std::map<char*, Segment> segments_;
  Pieces pieces_;
  FreePieces free_;
  int64_t reserved_ = 0, used_ = 0, most_used_ = 0, system_calls_ = 0;
};

}  // namespace sherd::cpu
