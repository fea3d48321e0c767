// FlightRecorder: the last collectives of a group on this rank, for the case that it fails: what
// was issued, what has begun, what has ended, and when. All backends share it, for the group's
// queue does the recording.
//
//     recorder.issued(tag);  recorder.began(tag.sequence);  recorder.ended(tag.sequence, ok);
//     uint64_t n = recorder.transfer_issued("send to rank 1, tag 0, of float32 [4]");
//     std::string path = recorder.write("waited 600000 ms in ...");
//
//     group 'default', rank 3 of 8 (ranks of the job: 0, 1, ...), 2026-01-31 12:00:05 UTC
//     group 'default': rank 3 waited 600000 ms in #12 all_reduce SUM of float32 [4]. Arrived: ...
//           #  state         issued at   began after     ended after  collective
//          11  done         -601.204 s       0.000 s         0.003 s  #11 all_gather of float32 [8]
//          12  failed       -600.001 s       0.001 s       600.000 s  #12 all_reduce SUM of ...
//     sends and receives, by number, in order of issue:
//           0  queued       -600.001 s             -               -  send to rank 1, tag 0, of ...
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/collective_tag.h"

namespace sherd::dist {

class FlightRecorder {
 public:
  static constexpr size_t kKept = 64;  // besides those that have not ended

  // `rank` in the group; `ranks`: of the job, by group rank.
  FlightRecorder(std::string group, int rank, std::vector<int> ranks);

  void issued(const CollectiveTag& tag);
  void began(uint64_t sequence);
  void ended(uint64_t sequence, bool well);

  // Of a send or recv; begun: its other side was found.
  uint64_t transfer_issued(std::string what);
  void transfer_began(uint64_t number);
  void transfer_ended(uint64_t number, bool well);

  std::string text(const std::string& reason) const;
  // Writes text() into a new file of flight_folder(), and says so on stderr in one line. Returns
  // its path; empty, and a line that says why, if it cannot be written.
  std::string write(const std::string& reason) const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };
  struct Times {
    State state = State::kQueued;
    Clock::time_point issued = Clock::now(), began = {}, ended = {};
    void begin() { state = State::kRunning, began = Clock::now(); }
    void end(bool well) { state = well ? State::kDone : State::kFailed, ended = Clock::now(); }
  };
  struct Entry {
    CollectiveTag tag;
    Times times = {};
  };
  struct Transfer {
    uint64_t number = 0;
    std::string what;
    Times times = {};
  };
  Entry* find(uint64_t sequence);
  static std::string line(uint64_t number, const Times& times, Clock::time_point now,
                          const std::string& what);

  const std::string group_;
  const int rank_;
  const std::vector<int> ranks_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;  // by sequence number, without gaps
  uint64_t transfers_ = 0;
  std::map<uint64_t, Transfer> open_transfers_;
  std::deque<Transfer> ended_transfers_;  // kKept at most
};

// SHERD_FLIGHT_RECORD (sherdrun sets it to its log folder, if it has one), else /tmp/sherd-<user
// id>.
std::string flight_folder();

}  // namespace sherd::dist
