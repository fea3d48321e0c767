#include "distributed/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

namespace sherd::dist {

FlightRecorder::FlightRecorder(std::string group, int rank, std::vector<int> ranks)
    : group_(std::move(group)), rank_(rank), ranks_(std::move(ranks)) {}

FlightRecorder::Entry* FlightRecorder::find(uint64_t sequence) {
  if (entries_.empty() || sequence < entries_.front().tag.sequence) return nullptr;
  const uint64_t at = sequence - entries_.front().tag.sequence;
  return at < entries_.size() ? &entries_[at] : nullptr;
}

void FlightRecorder::issued(const CollectiveTag& tag) {
  std::lock_guard lock(mutex_);
  entries_.push_back({.tag = tag, .issued = Clock::now()});
  while (entries_.size() > kKept && entries_.front().state >= State::kDone) entries_.pop_front();
}

void FlightRecorder::began(uint64_t sequence) {
  std::lock_guard lock(mutex_);
  if (Entry* e = find(sequence)) e->state = State::kRunning, e->began = Clock::now();
}

void FlightRecorder::ended(uint64_t sequence, bool well) {
  std::lock_guard lock(mutex_);
  if (Entry* e = find(sequence))
    e->state = well ? State::kDone : State::kFailed, e->ended = Clock::now();
}

std::string FlightRecorder::text(const std::string& reason) const {
  const auto now = Clock::now();
  char line[160];
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    char s[32] = "-";
    if (from != Clock::time_point{} && to != Clock::time_point{})
      std::snprintf(s, sizeof s, "%.3f s", std::chrono::duration<double>(to - from).count());
    return std::string(s);
  };
  std::string members;
  for (const int r : ranks_) members += concat(members.empty() ? "" : ", ", r);
  const std::time_t date = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&date, &utc);
  std::strftime(line, sizeof line, "%Y-%m-%d %H:%M:%S UTC", &utc);
  std::string s = concat("group '", group_, "', rank ", rank_, " of ", ranks_.size(),
                         " (ranks of the job: ", members, "), ", line, "\n", reason, "\n");
  std::snprintf(line, sizeof line, "%7s  %-8s %14s %15s %15s  %s\n", "#", "state", "issued at",
                "began after", "ended after", "collective");
  s += line;
  std::lock_guard lock(mutex_);
  if (entries_.empty()) s += "        no collective was issued\n";
  for (const Entry& e : entries_) {
    const char* state = e.state == State::kQueued    ? "queued"
                        : e.state == State::kRunning ? "running"
                        : e.state == State::kDone    ? "done"
                                                     : "failed";
    std::snprintf(line, sizeof line, "%7llu  %-8s %14s %15s %15s  ",
                  static_cast<unsigned long long>(e.tag.sequence), state,
                  seconds(now, e.issued).c_str(), seconds(e.issued, e.began).c_str(),
                  seconds(e.began, e.ended).c_str());
    s += concat(line, e.tag.describe(), "\n");
  }
  return s;
}

std::string flight_folder() {
  if (const char* folder = std::getenv("SHERD_FLIGHT_RECORD"); folder && *folder) return folder;
  return concat("/tmp/sherd-", getuid());
}

std::string FlightRecorder::write(const std::string& reason) const {
  const std::string folder = flight_folder();
  mkdir(folder.c_str(), 0700);
  const int rank = rank_ < 0 ? rank_ : ranks_[size_t(rank_)];
  const std::string path = concat(folder, "/flight_", getpid(), "_", group_, "_rank", rank, ".txt");
  // A file of the same name is of a process that is long gone. Anybody may have made the folder in
  // /tmp: somebody else's is not used, and no link is followed.
  struct stat s {};
  const bool mine = std::getenv("SHERD_FLIGHT_RECORD") ||
                    (lstat(folder.c_str(), &s) == 0 && S_ISDIR(s.st_mode) && s.st_uid == geteuid());
  if (mine) unlink(path.c_str());
  const int fd =
      mine ? open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
  if (fd >= 0) close(fd);
  std::ofstream out(fd >= 0 ? path : "");
  out << text(reason) << std::flush;
  if (!out) {
    std::fprintf(stderr, "[rank %d] cannot write the flight record of group '%s' to %s\n", rank,
                 group_.c_str(), path.c_str());
    return "";
  }
  std::fprintf(stderr, "[rank %d] the last collectives of group '%s' are in %s\n", rank,
               group_.c_str(), path.c_str());
  return path;
}

}  // namespace sherd::dist
