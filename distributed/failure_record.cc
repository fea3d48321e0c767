#include "distributed/failure_record.h"

#include <algorithm>
#include <sstream>
#include <thread>

namespace sherd::dist {
namespace {

constexpr Milliseconds kAnswers(1500);   // how long a reporter waits for the others' whereabouts
constexpr Milliseconds kReaders(1000);   // and until they have its record
constexpr Milliseconds kReporter(6000);  // and they for its record
constexpr Milliseconds kNotice(400);     // from a broken connection to the reason in the store

// The first letter of a record in the store: of a deadline that passed, or of something else.
constexpr char kOfDeadline = 'D', kOther = 'O';

std::string to_text(const FailureRecord::Where& w) {
  return concat(w.sequence, " ", int(w.inside), " ", w.doing);
}
FailureRecord::Where where_from(const std::string& text) {
  FailureRecord::Where w{0, false, ""};
  std::istringstream in(text);
  in >> w.sequence >> w.inside;
  in.get();
  std::getline(in, w.doing, '\0');
  return w;
}

}  // namespace

FailureRecord::FailureRecord(std::shared_ptr<Store> store, int rank, std::vector<int> ranks,
                             std::string group)
    : store_(std::move(store)), rank_(rank), ranks_(std::move(ranks)), group_(std::move(group)) {}

std::string FailureRecord::names(const std::vector<int>& group_ranks) const {
  std::string s = group_ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < group_ranks.size(); ++i)
    s += concat(i ? ", " : "", ranks_[group_ranks[i]]);
  return s;
}

std::string FailureRecord::of_text(const std::string& text, bool of_deadline) {
  is_of_deadline_ |= of_deadline;
  try {
    const std::string record =
        taken(store_->compare_set("failure", "", (of_deadline ? kOfDeadline : kOther) + text));
    if (of_deadline && ranks_[rank_] == 0) await_readers(true);
    return record;
  } catch (const std::exception&) {
    return text;
  }
}

void FailureRecord::note_refusal(uint64_t sequence, const std::string& text) {
  try {
    store_->set(concat("refused/", rank_), concat(sequence, " ", text));
  } catch (const std::exception&) {  // the caller has the error itself
  }
}

void FailureRecord::forget_refusal() {
  try {
    store_->delete_key(concat("refused/", rank_));
  } catch (const std::exception&) {  // a record will say too much
  }
}

std::string FailureRecord::refusal_of(int rank) {
  const std::string key = concat("refused/", rank);
  if (!store_->check({key})) return "";
  std::istringstream in(store_->get(key));
  uint64_t refused = 0;
  std::string text;
  in >> refused;
  in.get();
  std::getline(in, text, '\0');
  return concat("; before, it was refused call #", refused, ": ", text);
}

std::string FailureRecord::await_record(Milliseconds patience) {
  try {
    store_->wait({"failure"}, patience);
    return taken(store_->get("failure"));
  } catch (const StoreTimeout&) {
    return "";
  }
}

std::string FailureRecord::of_deadline(const Where& here, Milliseconds waited) {
  const std::string alone = concat("group '", group_, "': rank ", ranks_[rank_], " waited ",
                                   waited.count(), " ms in ", here.doing, " for the other ranks");
  is_of_deadline_ = true;
  try {
    store_->set(concat("where/", rank_), to_text(here));
    const std::string me = std::to_string(rank_);
    if (store_->compare_set("reporter", "", me) == me) {
      const std::string text =
          taken(store_->compare_set("failure", "", kOfDeadline + report(here, waited)));
      await_readers();
      return text;
    }
    const std::string record = await_record(kReporter);
    if (record.empty()) return of_text(alone);
    if (ranks_[rank_] == 0) await_readers();  // it serves the store
    return record;
  } catch (const std::exception& e) {
    return concat(alone, "; who they are cannot be said (", e.what(), ")");
  }
}

std::string FailureRecord::taken(const std::string& record) {
  is_of_deadline_ |= record.starts_with(kOfDeadline);
  try {
    store_->set(concat("read/", rank_), "");
  } catch (const std::exception&) {  // the record is here all the same
  }
  return record.substr(1);
}

// This process may end with its error, and the store with it.
void FailureRecord::await_readers(bool all) {
  try {
    std::vector<std::string> keys;
    for (size_t r = 0; r < ranks_.size(); ++r)
      if (all || store_->check({concat("where/", r)})) keys.push_back(concat("read/", r));
    store_->wait(keys, kReaders);
  } catch (const std::exception&) {  // who does not read by now may never
  }
}

std::string FailureRecord::report(const Where& here, Milliseconds waited) {
  std::vector<std::string> keys;
  for (size_t r = 0; r < ranks_.size(); ++r) keys.push_back(concat("where/", r));
  try {
    store_->wait(keys, kAnswers);
  } catch (const StoreTimeout&) {  // some do not answer: the text says so
  }
  std::vector<int> arrived, silent;
  std::string absent;
  for (int r = 0; r < int(ranks_.size()); ++r) {
    if (!store_->check({keys[r]})) {
      silent.push_back(r);
      continue;
    }
    const Where w = where_from(store_->get(keys[r]));
    if (w.sequence == here.sequence && w.inside) {
      arrived.push_back(r);
      continue;
    }
    absent += concat(absent.empty() ? "" : "; ", "rank ", ranks_[r],
                     w.inside          ? " is in "
                     : w.sequence == 0 ? " has entered no collective yet"
                                       : " has entered nothing since ",
                     w.doing, w.inside ? "" : refusal_of(r));
  }
  std::string s = concat("group '", group_, "': rank ", ranks_[rank_], " waited ", waited.count(),
                         " ms in ", here.doing, ". Arrived: ", names(arrived));
  if (absent.empty() && silent.empty())
    return s + ". All have arrived, so the transfer itself is too slow or stuck";
  s += ". Did not arrive: ";
  if (!silent.empty())
    s += concat(names(silent), silent.size() == 1 ? " does" : " do",
                " not answer (ended, stopped, or hanging)", absent.empty() ? "" : "; ");
  return s + absent + here.hint;
}

std::string FailureRecord::of_lost(const Where& here, const std::vector<int>& lost) {
  const std::string who = lost.empty() ? "a rank" : names(lost);
  std::string text = concat("group '", group_, "': ", who,
                            " left (ended, was killed, or closed the connection) while rank ",
                            ranks_[rank_], here.inside ? " was in " : " was idle after ",
                            here.sequence == 0 ? "the start" : here.doing);
  try {
    store_->set(concat("where/", rank_), to_text(here));
    for (auto left = kNotice; left.count() > 0; left -= Milliseconds(20)) {
      if (store_->check({"failure"})) return taken(store_->get("failure"));
      if (store_->check({"reporter"})) {
        is_of_deadline_ = true;
        const std::string record = await_record(kReporter);
        if (record.empty()) break;
        if (ranks_[rank_] == 0) await_readers();
        return record;
      }
      std::this_thread::sleep_for(Milliseconds(20));
    }
    for (const int rank : lost) text += refusal_of(rank);
  } catch (const std::exception& e) {
    return concat(text, " (", e.what(), ")");
  }
  return of_text(text);
}

}  // namespace sherd::dist
