// Files, whole: mapped, read, or replaced in one step.
//
//     data::MappedFile file("train.bin");                   // nothing is read until it is touched
//     use(file.bytes());
//     data::replace_file("run/tokenizer.model", bytes);     // others see all of it, or the old one
//
// Errors name the path and what the system said.
#pragma once
#include <string>
#include <string_view>

namespace sherd::data {

// A file's bytes in memory that the system fills from it at need, and shares between processes.
// Who cuts the file short while it is mapped ends the program with SIGBUS.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // Error if it is missing, or not a regular file
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return bytes_; }

 private:
  std::string_view bytes_;
};

// Writes beside `path` and renames, so that a reader, or another writer at the same time, never
// meets a part of it. Makes missing folders.
void replace_file(const std::string& path, std::string_view bytes);

}  // namespace sherd::data
