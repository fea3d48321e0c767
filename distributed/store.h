// Store: a small map of keys and values that the ranks of a job share, for meeting each other and
// for the rare message outside the collectives (who failed, and why).
//
//     auto store = std::make_shared<MemoryStore>();        // ranks are threads of one process
//     store->set("address/0", "127.0.0.1:4711");
//     std::string a = store->get("address/0");             // waits for it, at most timeout()
//     int64_t n = store->add("arrived", 1);                // 1, 2, 3, ... over all ranks
//     PrefixStore mine("group7", store);                   // its "a" is the store's "group7/a"
//
// Keys and values are any bytes. All calls may be made from any thread. tcp_store.h has the store
// of ranks that are processes.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"

namespace sherd::dist {

using Milliseconds = std::chrono::milliseconds;
inline constexpr Milliseconds kDefaultTimeout = std::chrono::minutes(10);

// A wait ended without its keys. The text names those missing and the time waited.
class StoreTimeout : public Error {
 public:
  using Error::Error;
};

class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value; waits until the key is there, at most timeout() (StoreTimeout).
  virtual std::string get(const std::string& key) = 0;
  // Adds to the number that the key holds (none: 0) and returns the sum; the value becomes its
  // decimal text. Error if the value is no number.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Sets `desired` if the key holds `expected`, or is absent and `expected` is empty. Returns what
  // the key holds afterwards; for an absent key that was not set, `expected`.
  virtual std::string compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) = 0;
  virtual bool check(const std::vector<std::string>& keys) = 0;  // are all there now?
  // Returns once all are there. StoreTimeout after `timeout`.
  virtual void wait(const std::vector<std::string>& keys, Milliseconds timeout) = 0;
  void wait(const std::vector<std::string>& keys) { wait(keys, timeout()); }
  virtual bool delete_key(const std::string& key) = 0;  // was it there?
  virtual int64_t num_keys() = 0;
  virtual std::string name() const = 0;  // for messages: "tcp://127.0.0.1:29500"

  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

 private:
  Milliseconds timeout_ = kDefaultTimeout;
};

// The map itself, for threads of one process; a TcpStore's server keeps one too.
class MemoryStore : public Store {
 public:
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
  std::string name() const override { return "memory"; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// Another store's keys that begin with "<prefix>/".
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override;
  bool check(const std::vector<std::string>& keys) override;
  using Store::wait;
  void wait(const std::vector<std::string>& keys, Milliseconds timeout) override;
  bool delete_key(const std::string& key) override;
  int64_t num_keys() override;  // of the whole store below
  std::string name() const override { return store_->name(); }
  const std::shared_ptr<Store>& below() const { return store_; }

 private:
  std::string at(const std::string& key) const { return prefix_ + "/" + key; }
  std::vector<std::string> at(const std::vector<std::string>& keys) const;

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

// "'a', 'b' and 3 more": for messages.
std::string quote_keys(const std::vector<std::string>& keys);

}  // namespace sherd::dist
