// FileStore: the Store of ranks that share a folder and need no port: a file of changes, one after
// another, that each reads on from where it was.
//
//     FileStore store("/shared/job7");                 // made if it is not there
//     dist::init_process_group({.init_method = "file:///shared/job7", .rank = 0, .world_size = 2});
//
// [Note: file store] Two locks of the kernel's on the file, one byte each: the first is shared by
// all handles as long as they live, the second is taken for each call. Who opens the file and can
// have the first alone finds nobody alive, so what is in it was left by a job that was killed: it
// starts afresh. Who closes it and can have it alone removes the file. On a network file system
// these locks must work between its clients (NFS 4: yes).
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/store.h"

namespace sherd::dist {

class FileStore : public Store {
 public:
  // Error: the file cannot be opened for writing, or is something else than a store. `timeout` is
  // also for the lock of each call: StoreTimeout, if a process that holds it was stopped.
  explicit FileStore(const std::string& path, Milliseconds timeout = kDefaultTimeout);
  ~FileStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override;
  bool check(const std::vector<std::string>& keys) override;
  using Store::wait;
  void wait(const std::vector<std::string>& keys, Milliseconds timeout) override;
  bool delete_key(const std::string& key) override;
  int64_t num_keys() override;
  std::string name() const override { return "file://" + path_; }

 private:
  class Locked;  // the file's second lock, with values_ up to date
  void take_turn(Milliseconds patience);
  bool open_file();
  void read_on();
  void append(const std::string& key, const std::string* value);

  const std::string path_;
  int fd_ = -1;
  std::mutex mutex_;  // one call of this handle at a time
  int64_t read_ = 0;  // bytes
  std::map<std::string, std::string> values_;
};

}  // namespace sherd::dist
