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
  entries_.push_back({tag});
  while (entries_.size() > kKept && entries_.front().times.state >= State::kDone)
    entries_.pop_front();
}

void FlightRecorder::began(uint64_t sequence) {
  std::lock_guard lock(mutex_);
  if (Entry* e = find(sequence)) e->times.begin();
}

void FlightRecorder::ended(uint64_t sequence, bool well) {
  std::lock_guard lock(mutex_);
  if (Entry* e = find(sequence)) e->times.end(well);
}

uint64_t FlightRecorder::transfer_issued(std::string what) {
  std::lock_guard lock(mutex_);
  const uint64_t number = transfers_++;
  open_transfers_[number] = {number, std::move(what)};
  return number;
}

void FlightRecorder::transfer_began(uint64_t number) {
  std::lock_guard lock(mutex_);
  if (const auto it = open_transfers_.find(number); it != open_transfers_.end())
    it->second.times.begin();
}

void FlightRecorder::transfer_ended(uint64_t number, bool well) {
  std::lock_guard lock(mutex_);
  auto node = open_transfers_.extract(number);
  if (!node) return;
  node.mapped().times.end(well);
  ended_transfers_.push_back(std::move(node.mapped()));
  if (ended_transfers_.size() > kKept) ended_transfers_.pop_front();
}

std::string FlightRecorder::line(uint64_t number, const Times& t, Clock::time_point now,
                                 const std::string& what) {
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    char s[32] = "-";
    if (from != Clock::time_point{} && to != Clock::time_point{})
      std::snprintf(s, sizeof s, "%.3f s", std::chrono::duration<double>(to - from).count());
    return std::string(s);
  };
  const char* state = t.state == State::kQueued    ? "queued"
                      : t.state == State::kRunning ? "running"
                      : t.state == State::kDone    ? "done"
                                                   : "failed";
  char text[160];
  std::snprintf(text, sizeof text, "%7llu  %-8s %14s %15s %15s  ",
                static_cast<unsigned long long>(number), state, seconds(now, t.issued).c_str(),
                seconds(t.issued, t.began).c_str(), seconds(t.began, t.ended).c_str());
  return text + what + "\n";
}

std::string FlightRecorder::text(const std::string& reason) const {
  const auto now = Clock::now();
  char line[160];
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
  for (const Entry& e : entries_)
    s += FlightRecorder::line(e.tag.sequence, e.times, now, e.tag.describe());
  if (transfers_ == 0) return s;
  s += "sends and receives, by number, in order of issue:\n";
  std::map<uint64_t, const Transfer*> all;
  for (const Transfer& t : ended_transfers_) all[t.number] = &t;
  for (const auto& [number, t] : open_transfers_) all[number] = &t;
  for (const auto& [number, t] : all) s += FlightRecorder::line(number, t->times, now, t->what);
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
    std::fprintf(stderr, "[flight_record] rank %d cannot write that of group '%s' to %s\n", rank,
                 group_.c_str(), path.c_str());
    return "";
  }
  // sherdrun puts "[rank i]" before each line.
  std::fprintf(stderr, "[flight_record] the last collectives of rank %d in group '%s' are in %s\n",
               rank, group_.c_str(), path.c_str());
  return path;
}

}  // namespace sherd::dist
