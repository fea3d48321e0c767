#include "distributed/store.h"

#include <charconv>

#include "distributed/deadline.h"

namespace sherd::dist {

std::string quote_keys(const std::vector<std::string>& keys) {
  constexpr size_t kShown = 8;
  std::string s;
  for (size_t i = 0; i < keys.size() && i < kShown; ++i) s += (i ? ", '" : "'") + keys[i] + "'";
  if (keys.size() > kShown) s += concat(" and ", keys.size() - kShown, " more");
  return s;
}

void MemoryStore::set(const std::string& key, const std::string& value) {
  {
    std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  changed_.notify_all();
}

std::string MemoryStore::get(const std::string& key) {
  wait({key});
  std::lock_guard lock(mutex_);
  return values_[key];
}

int64_t MemoryStore::add(const std::string& key, int64_t amount) {
  int64_t sum = 0;
  {
    std::lock_guard lock(mutex_);
    std::string& value = values_[key];
    if (!value.empty()) {
      auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), sum);
      if (error != std::errc() || end != value.data() + value.size())
        fail("[store] add to key '", key, "', which holds '", value.substr(0, 40),
             "' and not a number");
    }
    sum = int64_t(uint64_t(sum) + uint64_t(amount));
    value = std::to_string(sum);
  }
  changed_.notify_all();
  return sum;
}

std::string MemoryStore::compare_set(const std::string& key, const std::string& expected,
                                     const std::string& desired) {
  std::string now;
  {
    std::lock_guard lock(mutex_);
    auto it = values_.find(key);
    if (it == values_.end()) {
      if (!expected.empty()) return expected;
      it = values_.emplace(key, desired).first;
    } else if (it->second == expected) {
      it->second = desired;
    }
    now = it->second;
  }
  changed_.notify_all();
  return now;
}

bool MemoryStore::check(const std::vector<std::string>& keys) {
  std::lock_guard lock(mutex_);
  for (const auto& k : keys)
    if (!values_.contains(k)) return false;
  return true;
}

void MemoryStore::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  std::unique_lock lock(mutex_);
  std::vector<std::string> missing;
  const bool all = changed_.wait_until(lock, deadline_after(timeout), [&] {
    missing.clear();
    for (const auto& k : keys)
      if (!values_.contains(k)) missing.push_back(k);
    return missing.empty();
  });
  if (!all)
    throw StoreTimeout(concat("[store] waited ", timeout.count(), " ms for ", quote_keys(missing),
                              " in the store '", name(), "': never set"));
}

bool MemoryStore::delete_key(const std::string& key) {
  std::lock_guard lock(mutex_);
  return values_.erase(key) > 0;
}

int64_t MemoryStore::num_keys() {
  std::lock_guard lock(mutex_);
  return int64_t(values_.size());
}

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix)), store_(std::move(store)) {
  set_timeout(store_->timeout());
}

std::vector<std::string> PrefixStore::at(const std::vector<std::string>& keys) const {
  std::vector<std::string> all;
  for (const auto& k : keys) all.push_back(at(k));
  return all;
}

void PrefixStore::set(const std::string& key, const std::string& value) {
  store_->set(at(key), value);
}
std::string PrefixStore::get(const std::string& key) {
  store_->wait({at(key)}, timeout());
  return store_->get(at(key));
}
int64_t PrefixStore::add(const std::string& key, int64_t amount) {
  return store_->add(at(key), amount);
}
std::string PrefixStore::compare_set(const std::string& key, const std::string& expected,
                                     const std::string& desired) {
  return store_->compare_set(at(key), expected, desired);
}
bool PrefixStore::check(const std::vector<std::string>& keys) { return store_->check(at(keys)); }
void PrefixStore::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  store_->wait(at(keys), timeout);
}
bool PrefixStore::delete_key(const std::string& key) { return store_->delete_key(at(key)); }
int64_t PrefixStore::num_keys() { return store_->num_keys(); }

}  // namespace sherd::dist
