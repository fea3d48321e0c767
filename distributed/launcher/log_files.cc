#include "distributed/launcher/log_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include <filesystem>

#include "core/error.h"

namespace sherd::dist {

LogFiles::LogFiles(const LaunchOptions& o) : redirects_(o.redirects), tee_(o.tee) {
  if (o.log_dir.empty() && !redirects_.any() && !tee_.any()) return;
  if (!redirects_.any() && !tee_.any()) tee_.all = 3;
  std::string pattern = "/tmp/sherdrun_XXXXXX";
  if (!o.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(o.log_dir, error);
    std::error_code ignored;
    if (!std::filesystem::is_directory(o.log_dir, ignored))
      throw BadLaunchOptions(concat("[launch] log_dir ", o.log_dir,
                                    " is no folder, and cannot be made: ",
                                    error ? error.message() : "there is a file of this name"));
    pattern = concat(o.log_dir, "/", o.run_id, "_XXXXXX");
  }
  if (!mkdtemp(pattern.data()))
    throw BadLaunchOptions(
        concat("[launch] cannot make a folder in log_dir ", o.log_dir, ": ", strerror(errno)));
  folder_ = pattern;
}

bool LogFiles::is_shown(int local_rank, int stream) const {
  return !redirects_.has(local_rank, stream) || tee_.has(local_rank, stream);
}

Fd LogFiles::open(int attempt, int local_rank, int stream) const {
  const std::string name = path(attempt, local_rank, stream);
  if (name.empty()) return Fd();
  std::filesystem::create_directories(std::filesystem::path(name).parent_path());
  Fd file(::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (file.fd() < 0) fail("[launch] cannot write ", name, ": ", strerror(errno));
  return file;
}

std::string LogFiles::path(int attempt, int local_rank, int stream) const {
  if (!any() || (!redirects_.has(local_rank, stream) && !tee_.has(local_rank, stream))) return "";
  return concat(folder_, "/attempt_", attempt, "/", local_rank,
                stream == 1 ? "/stdout.log" : "/stderr.log");
}

}  // namespace sherd::dist
