#include "distributed/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "distributed/fd.h"
#include "distributed/hex.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kState = "state.json";
// And a number, of the process too. Names that others may have given are left alone.
constexpr const char* kHiddenStep = ".tmp-step-";
constexpr const char* kHiddenOld = ".tmp-old-";
constexpr const char* kSetAside = ".set-aside-";  // before the step's name
constexpr const char* kSetAsideStep = ".set-aside-step-";
constexpr const char* kLock = ".lock";
constexpr const char* kStep = "step-";
constexpr int kFormat = 1;

[[noreturn]] void fail_with_errno(const std::string& what) {
  const int reason = errno;
  fail("[checkpoint] ", what, ": ", std::strerror(reason));
}

// The standard library's errors as ours; they name the path.
template <class F>
auto translated(F f) {
  try {
    return f();
  } catch (const fs::filesystem_error& e) {
    fail("[checkpoint] ", e.what());
  }
}

// A folder or file; closing it takes back its lock.
Fd open_to_read(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) fail_with_errno(path);
  return file;
}
bool try_lock(const Fd& file) { return ::flock(file.fd(), LOCK_EX | LOCK_NB) == 0; }

// Waits for it. Of the folder; or, for NFS locks none, of a file in it, open to write. Does nothing
// where the file system has no locks, or this process may not write there.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder) : file_(open_to_read(folder)) {
    held_ = lock();
    if (held_ || (errno != EBADF && errno != EINVAL && errno != EOPNOTSUPP)) return;
    file_ = Fd(::open((folder + "/" + kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    held_ = file_ && lock();
  }
  bool held() const { return held_; }

 private:
  bool lock() const {
    int rc;
    do rc = ::flock(file_.fd(), LOCK_EX);
    while (rc != 0 && errno == EINTR);
    return rc == 0;
  }

  Fd file_;
  bool held_ = false;
};

std::string checksum_of_state(const json& state) {
  const std::string text = state.dump();
  return hex_of(checksum_of(text.data(), int64_t(text.size())));
}

std::string unused_name(const std::string& folder, const std::string& what) {
  static std::atomic<int> counter = 0;
  std::string path;
  do {
    path = concat(folder, "/", what, "-", int64_t(::getpid()), "-", counter++);
  } while (fs::exists(path));
  return path;
}
std::string hidden_name(const std::string& folder, const std::string& what) {
  return unused_name(folder, ".tmp-" + what);
}

// Takes the step's name from a folder before it is removed.
void remove_folder(const std::string& folder, const std::string& path) {
  const std::string hidden = hidden_name(folder, "old");
  fs::rename(path, hidden);
  fs::remove_all(hidden);
}

std::vector<std::string> folders_beginning_with(const std::string& folder, const char* prefix) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with(prefix) && entry.is_directory())
      paths.push_back(entry.path());
  return paths;
}

// Steps that a writer set aside to put a new one in their place, and died: see [Note: publishing a
// checkpoint]. Those whose new one is there are left to the next writer. With the folder's lock.
void recover(const std::string& folder) {
  for (const std::string& path : folders_beginning_with(folder, kSetAsideStep)) {
    std::string name = fs::path(path).filename().string().substr(std::strlen(kSetAside));
    name = name.substr(0, name.find('-', std::strlen(kStep)));
    std::error_code ignored;  // who may not write here passes over the step
    if (name.starts_with(kStep) && !fs::exists(folder + "/" + name))
      fs::rename(path, folder + "/" + name, ignored);
  }
}
void recover_for_readers(const std::string& folder) {
  if (!fs::is_directory(folder) || folders_beginning_with(folder, kSetAsideStep).empty()) return;
  const FolderLock lock(folder);
  if (lock.held()) recover(folder);  // or a writer may be about to put its step there
}

// Hidden folders whose writer is dead: it has lost its lock.
void remove_leftovers(const std::string& folder) {
  recover(folder);
  for (const char* prefix : {kHiddenStep, kHiddenOld, kSetAsideStep})
    for (const std::string& path : folders_beginning_with(folder, prefix)) {
      const Fd it = open_to_read(path);
      std::error_code ignored;  // what cannot be removed harms nobody
      if (try_lock(it)) fs::remove_all(path, ignored);
    }
}

// With those above it that are not there yet, as lasting as what will be in them.
void make_folder(const fs::path& path) {
  std::vector<fs::path> made;
  for (fs::path p = path; !p.empty() && !fs::exists(p); p = p.parent_path()) made.push_back(p);
  fs::create_directories(path);
  for (const fs::path& p : made) sync_folder(p.has_parent_path() ? p.parent_path() : ".");
}

// By sizes alone unless `checksums`.
Checkpoint read_checkpoint(const std::string& path, bool checksums) {
  Checkpoint c{.path = path};
  const std::string state_path = path + "/" + kState;
  if (!fs::is_regular_file(state_path)) fail("[checkpoint] ", path, " has no ", kState);
  try {
    json all = json::parse(read_file(state_path));
    const std::string checksum = all.at("checksum");
    all.erase("checksum");
    if (checksum != checksum_of_state(all))
      fail("[checkpoint] ", state_path, " was changed: its checksum is not ", checksum);
    if (all.at("format") != kFormat)
      fail("[checkpoint] ", state_path, " has format ", all.at("format").dump(),
           "; this version reads ", kFormat);
    c.step = all.at("step");
    c.state = all.at("state");
    for (const auto& [name, file] : all.at("files").items()) {
      const auto checksum = number_from_hex(file.at("xxh3").get<std::string>());
      if (!checksum) fail("[checkpoint] ", state_path, " has no checksum of ", name);
      c.files[name] = {file.at("bytes"), *checksum};
    }
  } catch (const json::exception& e) {
    fail("[checkpoint] ", state_path, " is damaged: ", e.what());
  }
  for (const auto& [name, want] : c.files) {
    const std::string file = path + "/" + name;
    if (!fs::is_regular_file(file)) fail("[checkpoint] ", path, " lacks ", name);
    const int64_t bytes = int64_t(fs::file_size(file));
    if (bytes != want.bytes)
      fail("[checkpoint] ", file, " has ", bytes, " bytes, ", want.bytes, " were written");
    if (checksums && summarize_file(file) != want)
      fail("[checkpoint] ", file, " was changed: its checksum is not ", hex_of(want.checksum));
  }
  return c;
}

// A step's folder, which must hold that step.
Checkpoint read_step(const std::string& folder, int64_t step, bool checksums) {
  Checkpoint c =
      translated([&] { return read_checkpoint(folder + "/" + checkpoint_name(step), checksums); });
  if (c.step != step) fail("[checkpoint] ", c.path, " holds step ", c.step);
  return c;
}

// The folder, or what is in it, that this process may not read; empty: nothing.
std::string forbidden_in(const std::string& path) {
  const auto is_forbidden = [](const std::string& p, int how) {
    return ::faccessat(AT_FDCWD, p.c_str(), how, AT_EACCESS) != 0 && errno == EACCES;
  };
  const bool is_folder = fs::is_directory(path);
  if (is_forbidden(path, is_folder ? R_OK | X_OK : R_OK)) return path;
  if (!is_folder) return "";
  for (const auto& entry : fs::directory_iterator(path))
    if (is_forbidden(entry.path(), R_OK)) return entry.path();
  return "";
}

// One that may not be read is, for all that is known.
bool is_whole(const std::string& folder, int64_t step, bool checksums) {
  if (!forbidden_in(folder + "/" + checkpoint_name(step)).empty()) return true;
  try {
    read_step(folder, step, checksums);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// With the folder's lock, or by readers, who are content with what they see.
std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kStep) || !entry.is_directory()) continue;
    const char *first = name.data() + std::strlen(kStep), *last = name.data() + name.size();
    int64_t step = -1;
    const auto end = std::from_chars(first, last, step);
    if (end.ec == std::errc() && end.ptr == last && step >= 0 && checkpoint_name(step) == name)
      steps.push_back(step);
  }
  std::ranges::sort(steps);
  return steps;
}

}  // namespace

void report_to_stderr(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

std::string checkpoint_name(int64_t step) {
  if (step < 0) fail("[checkpoint] a step cannot be negative, got ", step);
  const std::string digits = std::to_string(step);
  return kStep + std::string(std::max<int>(0, 6 - int(digits.size())), '0') + digits;
}

// ---- reading

std::string Checkpoint::file(const std::string& name) const {
  if (!files.contains(name)) fail("[checkpoint] ", path, " has no file '", name, "'");
  return path + "/" + name;
}

Checkpoint open_checkpoint(const std::string& path, Verify verify) {
  return translated([&] {
    if (!fs::exists(path)) recover_for_readers(fs::path(path).parent_path());
    return read_checkpoint(path, verify == Verify::kChecksums);
  });
}

void need_readable(const std::string& path) {
  if (const std::string what = translated([&] { return forbidden_in(path); }); !what.empty())
    fail("[checkpoint] ", what,
         " may not be read by this user: give yourself the right to, or move ", path,
         " away to go on without it");
}

std::string checkpoint_around(const std::string& path) {
  if (path.empty()) return "";
  std::string target = path;
  try {
    target = target_of(path);  // also of a link to nothing yet
  } catch (const Error&) {     // nothing that a file could be
  }
  std::error_code error;
  for (fs::path at = fs::weakly_canonical(target, error).parent_path(); !at.empty();
       at = at.parent_path()) {
    if (fs::is_regular_file(at / kState, error)) {
      const json state = json::parse(read_file(at / kState), nullptr, /*allow_exceptions=*/false);
      if (state.is_object() && state.contains("checksum") && state.contains("files")) return at;
    }
    if (at == at.parent_path()) break;
  }
  return "";
}

void need_outside_of_checkpoints(const std::string& path) {
  if (const std::string around = checkpoint_around(path); !around.empty())
    fail(path, " would lie in the checkpoint ", around, ", whose files are what they are");
}

std::vector<int64_t> checkpoint_steps(const std::string& folder) {
  return translated([&]() -> std::vector<int64_t> {
    if (!fs::exists(folder)) return {};
    if (!fs::is_directory(folder)) fail("[checkpoint] ", folder, " is not a folder");
    recover_for_readers(folder);
    return steps_in(folder);
  });
}

std::optional<Checkpoint> latest_checkpoint(const std::string& folder, const Report& report) {
  const std::vector<int64_t> steps = checkpoint_steps(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    need_readable(folder + "/" + checkpoint_name(*step));
    try {
      return read_step(folder, *step, true);
    } catch (const Error& e) {
      report(concat("passing over ", checkpoint_name(*step), ", which is not whole: ", e.what()));
    }
  }
  if (!steps.empty())
    fail("[checkpoint] none of the ", steps.size(), " checkpoints in ", folder,
         " is whole; remove them to start afresh");
  return {};
}

// A folder that only looks like a checkpoint by its name, or in which somebody keeps more, is not
// for this program to remove.
void need_own_files(const std::string& path) {
  json state;
  if (fs::is_regular_file(path + "/" + kState))
    state = json::parse(read_file(path + "/" + kState), nullptr, /*allow_exceptions=*/false);
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename();
    const bool is_named =
        state.is_object() && state.contains("files") && state["files"].contains(name);
    if (name != kState && !is_named && !name.ends_with(".safetensors"))
      fail("[checkpoint] ", path, " holds ", name,
           ", which is no part of a checkpoint: move it elsewhere, or take another folder");
  }
}

void need_removable_checkpoints(const std::string& folder) {
  translated([&] {
    if (!fs::exists(folder)) return;
    for (int64_t step : steps_in(folder)) need_own_files(folder + "/" + checkpoint_name(step));
  });
}

void remove_checkpoints(const std::string& folder) {
  translated([&] {
    if (!fs::exists(folder)) return;
    const FolderLock lock(folder);
    recover(folder);
    need_removable_checkpoints(folder);
    for (int64_t step : steps_in(folder))
      remove_folder(folder, folder + "/" + checkpoint_name(step));
  });
}

// ---- writing

// Locked while it exists, removed with what is in it at the end, unless it was renamed.
class CheckpointWriter::HiddenFolder {
 public:
  explicit HiddenFolder(const std::string& path)
      : path(make(path)), descriptor_(open_to_read(path)) {
    try_lock(descriptor_);
  }
  ~HiddenFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  const std::string path;

 private:
  static const std::string& make(const std::string& path) {
    fs::create_directory(path);
    return path;
  }
  Fd descriptor_;
};

CheckpointWriter::CheckpointWriter(std::string folder, int64_t step, CheckpointOptions options)
    : folder_(std::move(folder)), step_(step), options_(std::move(options)) {
  const std::string name = checkpoint_name(step_), target = folder_ + "/" + name;
  if (options_.keep_last < 0)
    fail("[checkpoint] keep_last must not be negative, got ", options_.keep_last);
  translated([&] {
    make_folder(folder_);
    const FolderLock lock(folder_);
    remove_leftovers(folder_);
    if (!options_.overwrite && is_whole(folder_, step_, true))
      fail("[checkpoint] ", target, " is there already; it is overwritten on request only");
    hidden_ = std::make_unique<HiddenFolder>(hidden_name(folder_, name));
  });
  stage("begun");
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::stage(const std::string& name) const {
  if (options_.on_stage) options_.on_stage(name);
}

std::string CheckpointWriter::path(const std::string& name) const {
  if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos || name == kState)
    fail("[checkpoint] '", name, "' cannot be the name of a checkpoint's file");
  return hidden_->path + "/" + name;
}

void CheckpointWriter::add(const std::string& name, const FileSummary& summary) {
  path(name);
  files_[name] = summary;
}

void CheckpointWriter::sync_files() const {
  for (const auto& [name, summary] : files_) {
    const std::string file = path(name);
    if (!fs::is_regular_file(file))
      fail("[checkpoint] ", name, " was added, but is not in ", hidden_->path);
    if (int64_t(fs::file_size(file)) != summary.bytes)
      fail("[checkpoint] ", file, " has ", int64_t(fs::file_size(file)), " bytes, ", summary.bytes,
           " were added");
    if (::fsync(open_to_read(file).fd()) != 0) fail_with_errno(file);
  }
  for (const auto& entry : fs::directory_iterator(hidden_->path))
    if (const std::string name = entry.path().filename(); !files_.contains(name))
      fail("[checkpoint] ", name, " was written, but not added");
}

void CheckpointWriter::write_state(const json& state) const {
  try {
    json all = {{"format", kFormat}, {"step", step_}, {"state", state}, {"files", json::object()}};
    for (const auto& [name, s] : files_)
      all["files"][name] = {{"bytes", s.bytes}, {"xxh3", hex_of(s.checksum)}};
    all = json::parse(all.dump());  // as a reader will see it: a NaN is null
    all["checksum"] = checksum_of_state(all);
    const std::string text = all.dump(1) + "\n";
    AtomicFile file(hidden_->path + "/" + kState);
    file.write(text.data(), int64_t(text.size()));
    stage("state begun");
    file.commit();
  } catch (const json::exception& e) {
    fail("[checkpoint] the state cannot be written as JSON: ", e.what());
  }
}

std::string CheckpointWriter::commit(const json& state) {
  const std::string target = folder_ + "/" + checkpoint_name(step_);
  translated([&] {
    sync_files();
    write_state(state);
    stage("state written");
    sync_folder(hidden_->path);
    stage("synced");
    const FolderLock lock(folder_);
    publish(target);
    stage("published");
    sync_folder(folder_);
    prune();
    stage("pruned");
  });
  return target;
}

void CheckpointWriter::publish(const std::string& target) const {
  if (fs::exists(target)) {
    if (!fs::is_directory(target)) fail("[checkpoint] ", target, " is not a folder");
    if (!options_.overwrite && is_whole(folder_, step_, true))
      fail("[checkpoint] ", target,
           " was written by somebody else meanwhile; it is overwritten on request only");
    // In one step; the old one then has the hidden name.
    if (::renameat2(AT_FDCWD, hidden_->path.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) ==
        0) {
      stage("exchanged");
      sync_folder(folder_);  // before the old one goes
      remove_old(hidden_->path);
      return;
    }
    if (errno != EINVAL && errno != ENOSYS) fail_with_errno(target);
    const std::string old = unused_name(folder_, kSetAside + checkpoint_name(step_));
    fs::rename(target, old);
    stage("set aside");
    try {
      fs::rename(hidden_->path, target);
    } catch (...) {
      fs::rename(old, target);
      throw;
    }
    stage("put in its place");
    sync_folder(folder_);  // before the old one goes
    remove_old(old);
    return;
  }
  fs::rename(hidden_->path, target);
}

// The checkpoint is there: what goes wrong here is reported, not thrown.
void CheckpointWriter::remove_old(const std::string& path) const {
  try {
    remove_folder(folder_, path);
  } catch (const fs::filesystem_error& e) {
    options_.report(concat("cannot remove the old checkpoint ", path, ": ", e.what()));
  }
}

void CheckpointWriter::prune() const {
  if (!options_.keep_last) return;
  std::vector<int64_t> steps;
  try {
    steps = steps_in(folder_);
  } catch (const fs::filesystem_error& e) {
    options_.report(concat("cannot look for old checkpoints in ", folder_, ": ", e.what()));
  }
  int whole = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (*step == step_ || whole < options_.keep_last) {
      whole += !options_.damaged.contains(*step) && is_whole(folder_, *step, false);
      continue;
    }
    remove_old(folder_ + "/" + checkpoint_name(*step));
    stage("removed one");
  }
}

}  // namespace sherd::dist
