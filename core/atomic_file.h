// AtomicFile: a file that appears under its name whole or not at all. What is written goes to a
// temporary file beside it; commit() brings it to the disk and renames it. A process that dies
// before leaves the temporary file, and whatever had the name before.
//
//     AtomicFile file("run/state.json");
//     file.write(text.data(), text.size());
//     FileSummary s = file.commit();               // replaces an earlier run/state.json
//     ...
//     if (summarize_file("run/state.json") != s) fail(...);
//
// Errors name the path and the system's reason.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

struct FileSummary {
  int64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3, 64 bits, of the whole content
  bool operator==(const FileSummary&) const = default;
};

// The size of the blocks that have a checksum each, for readers of a part of a file.
inline constexpr int64_t kChecksumBlock = 1 << 18;

class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();  // without commit(): removes the temporary file
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  void write(const void* data, int64_t bytes);
  int64_t bytes() const { return bytes_; }  // written so far
  FileSummary commit();                     // once
  // After commit(): XXH3 of each kChecksumBlock bytes; the last block may be shorter.
  const std::vector<uint64_t>& block_checksums() const { return block_checksums_; }

 private:
  friend FileSummary summarize_file(const std::string& path);
  struct Hash;
  void end_block();
  std::string path_, temporary_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  std::unique_ptr<Hash> hash_, block_hash_;
  std::vector<uint64_t> block_checksums_;
};

// Where a file that AtomicFile writes under this path will lie: a symbolic link stays what it is,
// also one to nothing yet. Error where there is something else than a regular file to be replaced.
std::string target_of(const std::string& path);
FileSummary summarize_file(const std::string& path);
// XXH3, 64 bits.
uint64_t checksum_of(const void* data, int64_t bytes);
std::string read_file(const std::string& path);
// Brings the names in a folder to the disk, as fsync of a file does not.
void sync_folder(const std::string& path);

}  // namespace sherd
