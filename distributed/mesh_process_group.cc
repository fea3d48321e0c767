#include "distributed/mesh_process_group.h"

#include <signal.h>

#include "core/context.h"
#include "distributed/collective_hints.h"
#include "distributed/deadline.h"
#include "distributed/debug.h"
#include "distributed/mesh_exchange.h"
#include "distributed/outputs.h"

namespace sherd::dist {

using Clock = std::chrono::steady_clock;

// How long a rank that leaves waits for the others to leave too.
constexpr auto kFarewell = std::chrono::seconds(5);

// How often an idle progress thread looks whether its peers are there.
constexpr auto kLook = std::chrono::milliseconds(200);

MeshProcessGroup::MeshProcessGroup(Init init)
    : backend_(std::move(init.backend)),
      mesh_(std::move(init.mesh)),
      record_(init.store, init.rank, init.ranks, init.name),
      flight_(init.name, init.rank, init.ranks),
      checks_all_(mesh_ && debug_option(DebugOption::kCollectives, *init.store)),
      exchange_(std::move(init.exchange)),
      context_(Context::current()) {
  timeout_ = init.timeout;
  rank_ = init.rank;
  ranks_ = std::move(init.ranks);
  name_ = std::move(init.name);
  if (!exchange_) exchange_ = std::make_unique<MeshExchange>(mesh_.get(), rank_, size());
  if (!mesh_) return;
  point_to_point_ = std::make_unique<PointToPoint>(
      *mesh_, rank_, ranks_, flight_, [this](const std::string& doing, std::exception_ptr cause) {
        return fail_group([&] {
          try {
            std::rethrow_exception(cause);
          } catch (const ConnectionLost&) {
            return record_.of_lost({last_sequence(), true, doing}, mesh_->lost_peers());
          } catch (const std::exception& e) {
            return record_.of_text(
                concat("group '", name_, "': rank ", ranks_[rank_], " in ", doing, ": ", e.what()),
                dynamic_cast<const DeadlinePassed*>(&e));
          }
        });
      });
  thread_ = std::thread([this] { progress(); });
}

MeshProcessGroup::~MeshProcessGroup() {
  bool left;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    left = leaving_;
  }
  changed_.notify_all();
  if (!left && mesh_) fail_group([this] { return concat("group '", name_, "' was destroyed"); });
  if (thread_.joinable()) thread_.join();
}

CollectiveCounts MeshProcessGroup::counts() const {
  std::lock_guard lock(mutex_);
  CollectiveCounts counts = counts_;
  counts.waited_ns = *waited_ns_;
  return counts;
}

uint64_t MeshProcessGroup::sequence_number() const {
  std::lock_guard lock(mutex_);
  return sequence_;
}

uint64_t MeshProcessGroup::last_sequence() const {
  std::lock_guard lock(mutex_);
  return last_.sequence;
}

TimePoint MeshProcessGroup::deadline(const char* op, Options options) const {
  const Milliseconds timeout = options.timeout.value_or(timeout_);
  check_timeout(op, timeout);
  return deadline_after(timeout);
}

void MeshProcessGroup::check_alive(const char* op) const {
  if (failed_) fail("[", op, "] the group failed before. ", failure_);
  if (leaving_) fail("[", op, "] group '", name_, "' was destroyed: make a new one");
}

Work MeshProcessGroup::issue(const CollectiveTag& tag, std::vector<int> partners, Options options,
                             Body body) {
  check([&] { check_timeout(name_of(tag.kind), options.timeout.value_or(timeout_)); });
  Operation operation{tag, std::move(partners), options, std::move(body), Event::pending()};
  const Work work(operation.done, nullptr, waited_ns_);
  if (was_refused_.exchange(false)) record_.forget_refusal();
  {
    std::lock_guard lock(mutex_);
    check_alive(name_of(tag.kind));
    operation.tag.sequence = ++sequence_;
    if (checks_all_) operation.partners = everyone();
    flight_.issued(operation.tag);
    auto& count = tag.kind == CollectiveKind::kAllGather       ? counts_.all_gather
                  : tag.kind == CollectiveKind::kReduceScatter ? counts_.reduce_scatter
                  : tag.kind == CollectiveKind::kAllReduce     ? counts_.all_reduce
                  : tag.kind == CollectiveKind::kBroadcast     ? counts_.broadcast
                                                               : counts_.other;
    ++count.calls;
    count.bytes += tag.payload;
    if (mesh_) queue_.push_back(std::move(operation));
  }
  if (mesh_)
    changed_.notify_all();
  else
    run(operation);
  return work;
}

void MeshProcessGroup::check(const std::function<void()>& arguments) {
  try {
    arguments();
  } catch (const Error& e) {
    refused(e.what());
    throw;
  }
}

void MeshProcessGroup::refused(const std::string& text) {
  uint64_t call;
  {
    std::lock_guard lock(mutex_);
    if (!mesh_ || failed_ || leaving_) return;
    call = sequence_ + 1;
  }
  was_refused_ = true;
  record_.note_refusal(call, text);
  if (!checks_all_) return;
  fail_group([&] {
    return record_.of_text(concat("group '", name_, "': rank ", ranks_[rank_],
                                  " was refused call #", call, ": ", text));
  });
}

bool MeshProcessGroup::next(Operation& operation) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const bool woken =
          changed_.wait_for(lock, kLook, [&] { return closed_ || drained_ || !queue_.empty(); });
      if (!queue_.empty()) {
        operation = std::move(queue_.front());
        queue_.pop_front();
        return true;
      }
      if (woken) return false;
    }
    look_around();
  }
}

void MeshProcessGroup::progress() {
  ContextGuard guard(context_);
  sigset_t pipe;  // [Note: SIGPIPE]
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  try {
    exchange_->open();
  } catch (const ConnectionLost&) {
    fail_group([&] { return explain_lost({0, false, ""}); });
  } catch (const std::exception& e) {
    const std::string why = e.what();
    fail_group([&] {
      return record_.of_text(
          concat("group '", name_, "': rank ", ranks_[rank_], " cannot begin: ", why));
    });
  }
  for (Operation operation; next(operation);) run(operation);
  std::unique_lock lock(mutex_);
  if (failed_ || !drained_) return;
  lock.unlock();
  exchange_->say_goodbye(sequence_, Clock::now() + kFarewell);
  exchange_->await_goodbyes();
  mesh_->close();
}

void MeshProcessGroup::run(Operation& operation) {
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    error = failed_;
    last_ = operation.tag;
  }
  const Milliseconds timeout = operation.options.timeout.value_or(timeout_);
  try {
    if (!error) {
      flight_.began(operation.tag.sequence);
      if (operation.options.on_start) operation.options.on_start();
      MemoryScope scope(MemoryCategory::kCommunication);
      exchange_->begin(operation.tag, operation.partners, deadline_after(timeout));
      operation.body(*exchange_);
      exchange_->end();
    }
  } catch (...) {
    const auto cause = std::current_exception();
    flight_.ended(operation.tag.sequence, false);
    error = fail_group([&] { return explain(operation.tag, timeout, cause); });
    exchange_->drop();
  }
  flight_.ended(operation.tag.sequence, !error);
  operation.body = nullptr;  // lets its tensors go before anyone is told
  try {
    if (operation.options.on_end) operation.options.on_end();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  operation.options = {};
  operation.done.set_error(error);
}

std::exception_ptr MeshProcessGroup::fail_group(const std::function<std::string()>& text) {
  std::lock_guard one(failing_);
  std::exception_ptr cause;
  std::string failure;
  {
    std::lock_guard lock(mutex_);
    cause = failed_;
  }
  const bool is_new = !cause;
  if (is_new) {
    failure = text();
    cause = std::make_exception_ptr(Error(failure));
    std::lock_guard lock(mutex_);
    failed_ = cause;
    failure_ = failure;
  }
  if (mesh_) {
    mesh_->close();
    point_to_point_->stop(cause);
    if (is_new && record_.is_of_deadline()) flight_.write(failure);
  }
  return cause;
}

std::string MeshProcessGroup::explain(const CollectiveTag& tag, Milliseconds timeout,
                                      std::exception_ptr cause) {
  const auto me = concat("rank ", ranks_[rank_]);
  const FailureRecord::Where here{tag.sequence, true, tag.describe(), hint_of(tag)};
  try {
    std::rethrow_exception(cause);
  } catch (const TagMismatch& e) {
    const auto peer = concat("rank ", ranks_[e.peer]);
    if (e.theirs.kind == CollectiveKind::kLeave)
      return record_.of_text(concat("group '", name_, "': ", peer, " left it after #",
                                    e.theirs.sequence, " (destroy_process_group), and ", me,
                                    " entered ", here.doing, here.hint));
    return record_.of_text(concat("group '", name_, "': ranks are in different collectives: ", me,
                                  " entered ", here.doing, ", and ", peer, " entered ",
                                  e.theirs.describe(), "; they differ in ", e.what(),
                                  here.hint.empty() ? hint_of(e.theirs) : here.hint));
  } catch (const DeadlinePassed&) {
    return record_.of_deadline(here, timeout);
  } catch (const ConnectionLost&) {
    return explain_lost(here);
  } catch (const std::exception& e) {
    return record_.of_text(
        concat("group '", name_, "': ", me, " failed in ", here.doing, ": ", e.what()));
  } catch (...) {
    return record_.of_text(concat("group '", name_, "': ", me, " failed in ", here.doing));
  }
}

std::string MeshProcessGroup::explain_lost(const FailureRecord::Where& here) {
  // A wait may fail a moment before the mesh knows for which peer.
  for (int i = 0; i < 50 && mesh_->lost_peers().empty(); ++i)
    std::this_thread::sleep_for(Milliseconds(2));
  std::vector<int> lost, left;
  for (int p : mesh_->lost_peers()) (exchange_->goodbye_of(p) ? left : lost).push_back(p);
  if (!lost.empty() || left.empty()) return record_.of_lost(here, lost);
  return record_.of_text(concat("group '", name_, "': rank ", ranks_[left[0]], " left it after #",
                                exchange_->goodbye_of(left[0])->sequence,
                                " (destroy_process_group), and rank ", ranks_[rank_],
                                here.inside ? " entered " : " has a send or recv with it after ",
                                here.doing.empty() ? "the start" : here.doing, here.hint));
}

void MeshProcessGroup::look_around() {
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
  }
  const FailureRecord::Where here{last_.sequence, false, last_.sequence ? last_.describe() : ""};
  for (int p : mesh_->lost_peers()) {
    // Who said goodbye may go; unless a transfer waits for it.
    if (exchange_->goodbye_of(p) && !point_to_point_->waits_for(p)) continue;
    fail_group([&] { return explain_lost(here); });
    return;
  }
}

PointToPoint& MeshProcessGroup::point_to_point(const char* op, const Tensor& tensor, int peer) {
  check_member(op);
  if (!tensor.defined()) fail("[", op, "] the tensor is undefined");
  if (!tensor.device().is_cpu())
    fail("[", op, "] the tensor is on ", tensor.device(),
         ", and this group moves tensors of the cpu");
  if (peer >= size() || peer < -1)
    fail("[", op, "] rank ", peer, " is none of group '", name_, "', which has ranks 0 to ",
         size() - 1);
  if (peer == rank_) fail("[", op, "] rank ", peer, " is this rank itself: copy the tensor");
  std::lock_guard lock(mutex_);
  check_alive(op);
  if (!mesh_) fail("[", op, "] group '", name_, "' has no other rank");
  return *point_to_point_;
}

Work MeshProcessGroup::send(const Tensor& tensor, int destination, int tag, Options options) {
  if (destination < 0) fail("[send] rank ", destination, " is no destination");
  return point_to_point("send", tensor, destination)
      .send(tensor, destination, tag, deadline("send", options));
}

Work MeshProcessGroup::recv(const Tensor& tensor, int source, int tag, Options options) {
  PointToPoint& transfers = point_to_point("recv", tensor, source);
  check_outputs("recv", "tensor", {&tensor, 1});
  return transfers.recv(tensor, source, tag, deadline("recv", options));
}

void MeshProcessGroup::leave() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  if (point_to_point_) point_to_point_->finish();
  {
    std::lock_guard lock(mutex_);
    drained_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace sherd::dist
