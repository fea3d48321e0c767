// FlightRecorder: the last collectives of a group on this rank, for the case that it fails: what
// was issued, what has begun, what has ended, and when. All backends share it, for the group's
// queue does the recording.
//
//     recorder.issued(tag);  recorder.began(tag.sequence);  recorder.ended(tag.sequence, ok);
//     std::string path = recorder.write("waited 600000 ms in ...");
//
//     group 'default', rank 3 of 8 (ranks of the job: 0, 1, ...), 2026-01-31 12:00:05 UTC
//     group 'default': rank 3 waited 600000 ms in #12 all_reduce SUM of float32 [4]. Arrived: ...
//           #  state         issued at   began after     ended after  collective
//          11  done         -601.204 s       0.000 s         0.003 s  #11 all_gather of float32 [8]
//          12  failed       -600.001 s       0.001 s       600.000 s  #12 all_reduce SUM of ...
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
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

  std::string text(const std::string& reason) const;
  // Writes text() into a new file of flight_folder(), and says so on stderr in one line. Returns
  // its path; empty, and a line that says why, if it cannot be written.
  std::string write(const std::string& reason) const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };
  struct Entry {
    CollectiveTag tag;
    State state = State::kQueued;
    Clock::time_point issued, began = {}, ended = {};
  };
  Entry* find(uint64_t sequence);

  const std::string group_;
  const int rank_;
  const std::vector<int> ranks_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;  // by sequence number, without gaps
};

// SHERD_FLIGHT_RECORD (sherdrun sets it to its log folder, if it has one), else /tmp/sherd-<user
// id>.
std::string flight_folder();

}  // namespace sherd::dist
