// Two jobs must not write to one place: the first holds a lock while it runs.
//
//     lock_for_process(fileno(log), "run.jsonl");    // until it is closed
//     const RunLock lock("checkpoints");          // while it lives
//
// Error, at once, that names the process which holds it. A process that dies leaves nothing locked.
// File systems without locks let everybody in.
#pragma once
#include <string>

namespace examples {

void lock_for_process(int fd, const std::string& path);

// Makes the folder if need be, and a file .run-lock in it, which goes with the lock, as does a
// folder that it made and that has stayed empty.
class RunLock {
 public:
  explicit RunLock(const std::string& folder);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  // Error if the folder was moved or removed since, so that another job may have one of that name.
  void need_held() const;

 private:
  bool is_held() const;

  std::string path_;
  int fd_ = -1;
  bool made_ = false;
};

}  // namespace examples
