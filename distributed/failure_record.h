// FailureRecord: the one text by which all ranks of a group explain why it failed.
//
// [Note: failures] Whoever sees a failure first writes the record to the store, and breaks its
// connections only then; whoever finds a connection broken looks for the record, and writes one
// ("rank 1 left") only if there is none. A rank whose deadline passes makes itself the reporter,
// and breaks its connections: that wakes the others, who write down where they are, from which the
// reporter makes the record. So every rank throws the same text; without a store (rank 0 is gone,
// and it served the store) each says what it saw itself.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distributed/store.h"

namespace sherd::dist {

class FailureRecord {
 public:
  struct Where {            // a rank in its sequence of collectives
    uint64_t sequence;      // of the collective that it is in, or was in last
    bool inside;            // has entered it, and has not come out
    std::string doing;      // "#12 all_reduce SUM of float32 [4]"
    std::string hint = {};  // to end a text with
  };

  // `rank` in the group; `ranks`: global ranks by group rank, for messages.
  FailureRecord(std::shared_ptr<Store> store, int rank, std::vector<int> ranks, std::string group);

  // Each returns the group's text. of_text asks the store once; the others wait for what other
  // ranks have to say, up to 8 seconds, and longer only where the store itself does not answer.
  // of_text: of anything else. of_deadline: of a wait that has no place in the sequence.
  std::string of_text(const std::string& text, bool of_deadline = false);
  std::string of_deadline(const Where& here, Milliseconds waited);
  // Was it that a deadline passed, here or on a rank whose record this is?
  bool is_of_deadline() const { return is_of_deadline_; }
  // `lost`: group ranks whose connection broke.
  std::string of_lost(const Where& here, const std::vector<int>& lost);
  // This rank did not make call `sequence`, since an argument was refused with `text`. Records that
  // find it missing there say so. Never throws.
  void note_refusal(uint64_t sequence, const std::string& text);
  void forget_refusal();  // it made the call after all. Never throws.

 private:
  std::string refusal_of(int rank);                 // empty: none
  std::string taken(const std::string& record);     // its text; notes what it is of
  std::string await_record(Milliseconds patience);  // empty: there is none
  void await_readers(bool all = false);             // all ranks, or those that have answered
  std::string report(const Where& here, Milliseconds waited);
  std::string names(const std::vector<int>& group_ranks) const;

  std::shared_ptr<Store> store_;
  int rank_;
  std::vector<int> ranks_;
  std::string group_;
  bool is_of_deadline_ = false;  // one failure is explained at a time
};

}  // namespace sherd::dist
