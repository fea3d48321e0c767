#include "cli/paths.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/atomic_file.h"
#include "core/error.h"

namespace sherd::cli {

namespace fs = std::filesystem;

namespace {

// Through all links, also those to what is not there yet.
std::string resolved(const std::string& path) {
  std::string target = path;
  try {
    target = target_of(path);
  } catch (const Error&) {  // no regular file
  }
  std::error_code error;
  const fs::path found = fs::weakly_canonical(target, error);
  return error ? target : found.string();
}

bool is_same_file(const std::string& a, const std::string& b) {
  struct stat x, y;
  if (::stat(a.c_str(), &x) != 0 || ::stat(b.c_str(), &y) != 0) return resolved(a) == resolved(b);
  return S_ISREG(x.st_mode) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

[[noreturn]] void refuse_output(const std::string& flag, const std::string& path,
                                const std::string& why) {
  fail("cannot write ", flag, "=", path, ": ", why);
}

// Makes a file there and removes it.
void attempt(const std::string& flag, const std::string& path, const std::string& file) {
  try {
    const AtomicFile made(file);
  } catch (const Error& e) {
    std::string text = e.what();
    for (const std::string& front : {std::string("[write_file] "), file + ": "})
      if (text.starts_with(front)) text.erase(0, front.size());
    refuse_output(flag, path, text);
  }
}

}  // namespace

std::string from_user(const std::string& path) {
  // run/ names what run does: parent_path() and filename() know no difference then.
  const auto without_slash = [](const fs::path& p) {
    return (p.has_filename() ? p : p.parent_path()).string();
  };
  // a/../b is b only where a is no link.
  const auto in = [&](const fs::path& folder) {
    const fs::path whole = folder / path;
    bool goes_up = false;
    for (const fs::path& part : fs::path(path)) goes_up |= part == "..";
    return without_slash(goes_up ? whole : whole.lexically_normal());
  };
  if (path.empty()) return path;
  if (fs::path(path).is_absolute()) return without_slash(path);
  for (const char* variable : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"})
    if (const char* folder = std::getenv(variable); folder && *folder) return in(folder);
  std::error_code error;
  const fs::path here = fs::current_path(error);
  if (error) fail(path, " is relative to the current folder, which is gone");
  return in(here);
}

void need_input(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  struct stat info;
  if (::stat(path.c_str(), &info) != 0)
    fail(flag, "=", path, ": ",
         errno == ENOENT ? "there is no such file or folder" : std::strerror(errno));
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
    fail(flag, "=", path, " is neither a regular file nor a folder");
  if (::access(path.c_str(), R_OK) != 0)
    fail("cannot read ", flag, "=", path, ": ", std::strerror(errno));
}

void need_output_file(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  const std::string folder = fs::path(path).parent_path();
  struct stat info;
  if (::stat(folder.c_str(), &info) != 0 && errno == ENOENT)
    refuse_output(flag, path, "there is no folder " + folder);
  attempt(flag, path, path);
}

void need_log(const std::string& flag, const std::string& path) {
  struct stat info;
  if (path.empty()) return;
  if (::stat(path.c_str(), &info) != 0) return need_output_file(flag, path);
  if (!S_ISREG(info.st_mode) && !S_ISCHR(info.st_mode))
    refuse_output(flag, path, "it is not a regular file");
  if (::access(path.c_str(), W_OK) != 0) refuse_output(flag, path, std::strerror(errno));
}

void need_folder(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  fs::path at = path;
  struct stat info;
  while (::stat(at.c_str(), &info) != 0) {
    if (errno != ENOENT) refuse_output(flag, path, std::strerror(errno));
    if (::lstat(at.c_str(), &info) == 0)
      refuse_output(flag, path, at.string() + " is a link to nothing");
    if (!at.has_relative_path()) refuse_output(flag, path, std::strerror(ENOENT));
    at = at.parent_path();
  }
  if (!S_ISDIR(info.st_mode)) refuse_output(flag, path, at.string() + " is not a folder");
  attempt(flag, path, at / ".attempt");
}

void need_safetensors_name(const std::string& flag, const std::string& path) {
  for (const char* ending : {".pt", ".pth", ".bin", ".pkl", ".ckpt"})
    if (path.ends_with(ending))
      fail(flag, "=", path,
           ": weights are written as .safetensors, which torch reads with "
           "safetensors.torch.load_file: give a name that ends so");
}

void need_different(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs) {
  const auto check = [](const NamedPath& a, const NamedPath& b) {
    if (!a.path.empty() && !b.path.empty() && is_same_file(a.path, b.path))
      fail(a.flag, "=", a.path, " and ", b.flag, "=", b.path, " are the same file");
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const NamedPath& input : inputs) check(outputs[i], input);
    for (size_t k = 0; k < i; ++k) check(outputs[k], outputs[i]);
  }
}

bool lies_in(const std::string& path, const std::string& folder) {
  const fs::path inner = resolved(path), outer = resolved(folder);
  const auto [end, ignored] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return end == outer.end();
}

}  // namespace sherd::cli
