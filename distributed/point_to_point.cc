#include "distributed/point_to_point.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "core/context.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kLetterChannel = 3, kBytesChannel = uint64_t(1) << 32;

}  // namespace

PointToPoint::PointToPoint(Mesh& mesh, int rank, std::vector<int> ranks, FlightRecorder& flight,
                           Fail fail)
    : mesh_(mesh),
      rank_(rank),
      ranks_(std::move(ranks)),
      flight_(flight),
      fail_(std::move(fail)),
      context_(Context::current()),
      next_id_(ranks_.size()) {}

PointToPoint::~PointToPoint() {
  if (thread_.joinable()) thread_.join();
}

Work PointToPoint::send(const Tensor& tensor, int destination, int tag, TimePoint deadline) {
  return issue({true, tensor, destination, tag, deadline});
}

Work PointToPoint::recv(const Tensor& tensor, int source, int tag, TimePoint deadline) {
  tensor.bump_version();
  return issue({false, tensor, source, tag, deadline});
}

Work PointToPoint::issue(Transfer transfer) {
  const Work work(transfer.done, transfer.source);
  std::lock_guard lock(mutex_);
  if (stopped_) std::rethrow_exception(stopped_);
  if (finishing_) fail("[send, recv] the group was destroyed: make a new one");
  ++under_way_[transfer.peer];
  transfer.number = flight_.transfer_issued(describe(transfer));
  issued_.push_back(std::move(transfer));
  if (!started_) {
    started_ = true;
    inbox_ = std::make_unique<Mail>();
    inbox_->buffer = mesh_.buffer(&inbox_->letter, sizeof(Letter));
    thread_ = std::thread([this] { run(); });
  }
  inbox_->buffer->wake();
  return work;
}

void PointToPoint::finish() {
  {
    std::lock_guard lock(mutex_);
    finishing_ = true;
    if (inbox_) inbox_->buffer->wake();
  }
  if (thread_.joinable()) thread_.join();
}

void PointToPoint::stop(std::exception_ptr cause) {
  std::lock_guard lock(mutex_);
  if (!stopped_) stopped_ = cause;
  if (inbox_) inbox_->buffer->wake();
}

bool PointToPoint::waits_for(int peer) const {
  std::lock_guard lock(mutex_);
  const auto it = under_way_.find(peer);
  return it != under_way_.end() && it->second > 0;
}

void PointToPoint::finished(const Transfer& t) {
  flight_.transfer_ended(t.number, true);
  {
    std::lock_guard lock(mutex_);
    --under_way_[t.peer];
  }
  t.done.set();
}

std::string PointToPoint::describe(const Transfer& t) const {
  const std::string peer = t.peer < 0 ? "any rank" : concat("rank ", global(t.peer));
  return concat(t.sends ? "send to " : "recv from ", peer, ", tag ", t.tag, ", of ",
                t.tensor.dtype(), " ", t.tensor.sizes());
}

void PointToPoint::run() {
  ContextGuard guard(context_);
  MemoryScope scope(MemoryCategory::kCommunication);
  sigset_t pipe;  // [Note: SIGPIPE]
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  std::exception_ptr cause;
  try {
    inbox_->buffer->recv_any(kLetterChannel, 0, sizeof(Letter));
    for (;;) {
      take_issued();
      {
        std::lock_guard lock(mutex_);
        if (stopped_) break;
        if (finishing_ && issued_.empty() && sends_.empty() && recvs_.empty()) break;
      }
      await_letter();
    }
    std::lock_guard lock(mutex_);
    cause = stopped_;
  } catch (const DeadlinePassed&) {
    std::string late;
    for (const auto* list : {&sends_, &recvs_})
      for (const Transfer& t : *list)
        if (t.deadline <= Clock::now()) late += (late.empty() ? "" : "; ") + describe(t);
    cause =
        fail_(late, std::make_exception_ptr(DeadlinePassed("no call that matches came in time")));
  } catch (...) {
    cause = fail_("send or recv", std::current_exception());
  }
  if (!cause) {
    for (auto& a : answers_) try {
        a->buffer->wait_send(Clock::now() + std::chrono::seconds(5));
      } catch (const Error&) {  // the peer had what it waited for
      }
    return;
  }
  std::lock_guard lock(mutex_);
  stopped_ = cause;
  const auto end = [&](const Transfer& t) {
    flight_.transfer_ended(t.number, false);
    t.done.set_error(cause);
  };
  for (const auto* list : {&sends_, &recvs_})
    for (const Transfer& t : *list) end(t);
  for (const Transfer& t : issued_) end(t);
  sends_.clear(), recvs_.clear(), issued_.clear(), answers_.clear();
}

void PointToPoint::take_issued() {
  for (;;) {
    Transfer t;
    {
      std::lock_guard lock(mutex_);
      if (issued_.empty()) return;
      t = std::move(issued_.front());
      issued_.pop_front();
    }
    t.sends ? start_send(std::move(t)) : start_recv(std::move(t));
  }
}

std::unique_ptr<PointToPoint::Mail> PointToPoint::post(int peer, const Letter& letter) {
  auto mail = std::make_unique<Mail>();
  mail->letter = letter;
  mail->buffer = mesh_.buffer(&mail->letter, sizeof(Letter));
  mail->buffer->send(peer, kLetterChannel, 0, sizeof(Letter));
  return mail;
}

void PointToPoint::start_send(Transfer transfer) {
  sends_.push_back(std::move(transfer));  // first: if anything below throws, it is told
  Transfer& t = sends_.back();
  t.id = next_id_[t.peer]++;
  t.dense = contiguous_raw(t.tensor);
  Letter offer{Letter::kOffer, t.id, t.tag, t.tensor.dtype(), t.tensor.dim(), {}};
  std::copy(t.tensor.sizes().begin(), t.tensor.sizes().end(), offer.sizes);
  t.offer = post(t.peer, offer);
  if (t.dense.nbytes() == 0) return;
  t.bytes = mesh_.buffer(t.dense.bytes(), t.dense.nbytes());
  t.bytes->send(t.peer, kBytesChannel + t.id, 0, t.dense.nbytes());
}

void PointToPoint::start_recv(Transfer t) {
  auto it = std::find_if(offers_.begin(), offers_.end(), [&](const Offer& o) {
    return (t.peer < 0 || t.peer == o.source) && o.letter.tag == t.tag;
  });
  if (it == offers_.end()) {
    recvs_.push_back(std::move(t));
    return;
  }
  const Offer offer = std::move(*it);
  offers_.erase(it);
  receive(std::move(t), offer.source, offer.letter);
}

void PointToPoint::receive(Transfer transfer, int source, const Letter& offer) {
  recvs_.push_back(std::move(transfer));
  Transfer& t = recvs_.back();
  flight_.transfer_began(t.number);
  if (offer.dtype != t.tensor.dtype() || offer.shape().numel() != t.tensor.numel())
    fail("rank ", global(source), " sent ", offer.dtype, " ", offer.shape(), " with tag ", t.tag,
         ", and rank ", global(rank_), " expects ", t.tensor.dtype(), " ", t.tensor.sizes());
  t.dense = t.tensor.is_contiguous() ? t.tensor : empty(t.tensor.sizes(), t.tensor.dtype());
  if (t.dense.nbytes() > 0) {
    t.bytes = mesh_.buffer(t.dense.bytes(), t.dense.nbytes());
    t.bytes->recv(source, kBytesChannel + offer.id, 0, t.dense.nbytes());
    t.bytes->wait_recv(t.deadline);
    if (!t.dense.is_same(t.tensor)) copy_raw(t.tensor, t.dense);
  }
  Letter done;
  done.kind = Letter::kDone;
  done.id = offer.id;
  answers_.push_back(post(source, done));
  if (answers_.size() > 64) {  // the oldest have long been read
    answers_[0]->buffer->wait_send(t.deadline);
    answers_.erase(answers_.begin());
  }
  *t.source = source;
  Transfer ended = std::move(t);
  recvs_.pop_back();
  ended.tensor = ended.dense = {};  // go before anyone is told
  ended.bytes = nullptr;
  finished(ended);
}

void PointToPoint::await_letter() {
  auto deadline = TimePoint::max();
  for (const auto* list : {&sends_, &recvs_})
    for (const Transfer& t : *list) deadline = std::min(deadline, t.deadline);
  const int source = inbox_->buffer->wait_recv(deadline);
  if (source < 0) return;  // woken
  const Letter letter = inbox_->letter;
  inbox_->buffer->recv_any(kLetterChannel, 0, sizeof(Letter));
  if (letter.kind == Letter::kDone) {
    auto it = std::find_if(sends_.begin(), sends_.end(), [&](const Transfer& t) {
      return t.peer == source && t.id == letter.id;
    });
    if (it == sends_.end()) fail("rank ", global(source), " confirms what was not sent");
    it->offer->buffer->wait_send(it->deadline);
    if (it->bytes) it->bytes->wait_send(it->deadline);
    Transfer ended = std::move(*it);
    sends_.erase(it);
    ended.bytes = nullptr;
    ended.tensor = ended.dense = {};  // go before anyone is told
    finished(ended);
    return;
  }
  auto it = std::find_if(recvs_.begin(), recvs_.end(), [&](const Transfer& t) {
    return (t.peer < 0 || t.peer == source) && t.tag == letter.tag;
  });
  if (it == recvs_.end()) {
    offers_.push_back({source, letter});
    return;
  }
  Transfer t = std::move(*it);
  recvs_.erase(it);
  receive(std::move(t), source, letter);
}

}  // namespace sherd::dist
