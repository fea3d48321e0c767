#include "distributed/mesh_process_group.h"

#include <signal.h>

#include "core/context.h"

namespace sherd::dist {

using Clock = std::chrono::steady_clock;

// How long a rank that leaves waits for the others to leave too.
constexpr auto kFarewell = std::chrono::seconds(5);

MeshProcessGroup::MeshProcessGroup(Init init)
    : backend_(std::move(init.backend)),
      timeout_(init.timeout),
      mesh_(std::move(init.mesh)),
      store_(std::move(init.store)),
      exchange_(mesh_.get(), init.rank, int(init.ranks.size())),
      context_(Context::current()) {
  rank_ = init.rank;
  ranks_ = std::move(init.ranks);
  name_ = std::move(init.name);
  if (mesh_) thread_ = std::thread([this] { progress(); });
}

MeshProcessGroup::~MeshProcessGroup() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

CollectiveCounts MeshProcessGroup::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

uint64_t MeshProcessGroup::sequence_number() const {
  std::lock_guard lock(mutex_);
  return sequence_;
}

Work MeshProcessGroup::issue(const CollectiveTag& tag, std::vector<int> partners, Options options,
                             Body body) {
  Operation operation{tag, std::move(partners), options, std::move(body), Event::pending()};
  const Work work(operation.done);
  {
    std::lock_guard lock(mutex_);
    if (!failure_.empty())
      fail("[", name_of(tag.kind), "] group '", name_, "' has failed before: ", failure_);
    if (closed_ || leaving_)
      fail("[", name_of(tag.kind), "] group '", name_, "' was destroyed: make a new one");
    operation.tag.sequence = ++sequence_;
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

void MeshProcessGroup::progress() {
  ContextGuard guard(context_);
  sigset_t pipe;  // [Note: SIGPIPE]
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  exchange_.open();
  for (;;) {
    Operation operation;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || leaving_ || !queue_.empty(); });
      if (closed_) return;
      if (queue_.empty()) break;
      operation = std::move(queue_.front());
      queue_.pop_front();
    }
    run(operation);
  }
  if (failure_.empty()) exchange_.say_goodbye(sequence_ + 1, Clock::now() + kFarewell);
}

void MeshProcessGroup::run(Operation& operation) {
  std::exception_ptr error;
  try {
    if (operation.options.on_start) operation.options.on_start();
    MemoryScope scope(MemoryCategory::kCommunication);
    exchange_.begin(operation.tag, operation.partners,
                    Clock::now() + operation.options.timeout.value_or(timeout_));
    operation.body(exchange_);
    exchange_.end();
  } catch (...) {
    error = failure(operation, std::current_exception());
  }
  operation.body = nullptr;  // lets its tensors go before anyone is told
  if (operation.options.on_end) operation.options.on_end();
  operation.done.set_error(error);
}

std::exception_ptr MeshProcessGroup::failure(const Operation& operation, std::exception_ptr cause) {
  std::string text;
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& e) {
    text = concat("group '", name_, "', rank ", rank_, " in ", operation.tag.describe(), ": ",
                  e.what());
  }
  if (mesh_) mesh_->close();
  exchange_.drop();
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = text;
  return std::make_exception_ptr(Error(text));
}

void MeshProcessGroup::leave() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace sherd::dist
