// MpiMesh: a Mesh by MPI's messages.
//
// [Note: tags of MPI] All groups share one communicator, for to make one is a collective of MPI
// that no deadline can end. A group has a number that no two of its ranks had before, and a tag is
//     number (28 bits), channel (2 bits)                       of the channels below kChannels
//     1 (1 bit), number (15 bits), channel (15 bits)           of the others: bytes of send and recv
// whose low bits are enough, since it is checked that no two such sends are under way.
//
// [Note: waiting for MPI] MPI has no wait that lets other threads compute, and moves data only
// while somebody calls it. So who waits looks again and again: without a pause as long as the bytes
// would take at 1 GB/s, for then they may be on their way; later with pauses of an eighth of the
// time waited so far, 0.5 ms at most.
//
// [Note: closing over MPI] MPI has no connections. A mesh that closes sends each peer a notice, for
// which each has posted a receive, and cancels its own receives. A peer is lost if its notice has
// come, or if its process has ended. What a peer has begun to receive goes on, and reads the
// sender's bytes; so when all its receives have ended, it sends a second notice: from then on it
// takes nothing of this mesh. A closed mesh's buffers wait in their destructors, for 5 s at most,
// until MPI does not need their bytes any more; see [Note: given up].
#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "distributed/exchange_texts.h"
#include "distributed/mpi/mpi_job.h"
#include "distributed/mpi/mpi_process.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr uint64_t kNotice = 0, kChannels = 4;
constexpr int kChannelBits = 15;
constexpr int64_t kNumbers = int64_t(1) << 28;

constexpr auto kLongestPause = std::chrono::microseconds(500);
constexpr auto kWatch = std::chrono::milliseconds(10);     // between two looks at peers' processes
constexpr auto kNotices = std::chrono::microseconds(200);  // and at what they said
constexpr auto kSettle = std::chrono::seconds(5);
// MPI takes some messages a look: so often for what a peer sent before it was lost.
constexpr int kLastLooks = 100;
constexpr auto kSettleDead = std::chrono::milliseconds(100);

class Pause {
 public:
  explicit Pause(int64_t bytes) : looking_(std::chrono::nanoseconds(20000 + bytes)) {}
  void pause(Lock& lock, std::condition_variable& news) {
    const auto waited = Clock::now() - start_;
    if (waited < looking_) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      news.wait_for(lock, std::min<Clock::duration>(waited / 8, kLongestPause));
    }
  }

 private:
  Clock::time_point start_ = Clock::now();
  Clock::duration looking_;
};

class MpiBuffer;

class MpiMesh : public Mesh, public MpiProcess::Listener {
 public:
  MpiMesh(std::shared_ptr<MpiJob> job, int rank, std::vector<int> ranks, int64_t number,
          int64_t largest)
      : job_(std::move(job)),
        rank_(rank),
        ranks_(std::move(ranks)),
        number_(number),
        largest_(largest),
        lost_(ranks_.size()),
        takes_nothing_(ranks_.size()),
        noticed_(ranks_.size()),
        notices_(ranks_.size(), MPI_REQUEST_NULL) {
    Lock lock = mpi_.lock();
    for (int p = 0; p < size(); ++p)
      if (p != rank_) notices_[p] = mpi_.recv(nullptr, 0, process(p), tag(kNotice));
    mpi_.add(this);
  }
  ~MpiMesh() override {
    close();
    Lock lock = mpi_.lock();
    say_takes_nothing();
    mpi_.remove(this);
    for (MPI_Request& notice : notices_)
      if (mpi_.usable() && notice != MPI_REQUEST_NULL) {
        mpi_.cancel(notice);
        mpi_.test(notice);
      }
  }

  std::unique_ptr<Buffer> buffer(void* data, int64_t) override;
  std::vector<int> lost_peers() override {
    Lock lock = mpi_.lock();
    look(true);
    std::vector<int> list;
    for (int p = 0; p < size(); ++p)
      if (lost_[p]) list.push_back(p);
    return list;
  }
  void close() override {
    Lock lock = mpi_.lock();
    close_locked();
  }
  void on_end() override { close_locked(); }

  // ---- the buffers'; the lock is held
  MpiProcess& mpi() { return mpi_; }
  int64_t largest() const { return largest_; }
  void check_open(int peer) const {
    if (closed_ || !mpi_.usable()) throw ConnectionLost("the group was closed");
    if (peer >= 0 && lost_[peer]) throw ConnectionLost(concat("rank ", ranks_[peer], " is gone"));
  }
  bool is_lost(int peer) const { return peer >= 0 && lost_[peer]; }
  bool takes_nothing(int peer) const { return peer >= 0 && takes_nothing_[peer]; }
  bool has_ended(int peer) const { return peer >= 0 && job_->has_ended(ranks_[peer]); }
  void close_locked();
  void look(bool at_processes);
  int process(int peer) const { return peer < 0 ? MPI_ANY_SOURCE : job_->process_of(ranks_[peer]); }
  int peer_of(int process) const {
    for (int p = 0; p < size(); ++p)
      if (job_->process_of(ranks_[p]) == process) return p;
    return -1;
  }
  int tag(uint64_t channel) const {
    if (channel < kChannels) return int(number_ << 2 | int64_t(channel));
    const int64_t low = (int64_t(1) << kChannelBits) - 1;
    return int(int64_t(1) << 30 | (number_ & low) << kChannelBits | (int64_t(channel) & low));
  }
  // Of a send on a channel whose tag is not its own.
  void begin_send(int peer, uint64_t channel) {
    if (channel >= kChannels && !mpi_.take_tag(process(peer), tag(channel)))
      fail("[mpi] a send to rank ", ranks_[peer], " is under way since ", 1 << kChannelBits,
           " others, or groups, were begun: wait for it");
  }
  void end_send(int peer, uint64_t channel) {
    if (channel >= kChannels) mpi_.give_back_tag(process(peer), tag(channel));
  }
  std::set<MpiBuffer*> buffers;

 private:
  int size() const { return int(ranks_.size()); }
  void notify_all();
  void say_takes_nothing();

  MpiProcess& mpi_ = MpiProcess::get();
  std::shared_ptr<MpiJob> job_;
  int rank_;
  std::vector<int> ranks_;
  int64_t number_, largest_;
  bool closed_ = false, said_takes_nothing_ = false;
  Clock::time_point watched_at_, noticed_at_;
  std::vector<char> lost_, takes_nothing_;  // the latter: its second notice has come
  std::vector<char> noticed_;               // its first
  std::vector<MPI_Request> notices_;
};

class MpiBuffer : public Mesh::Buffer {
 public:
  MpiBuffer(MpiMesh& mesh, char* data) : mesh_(mesh), mpi_(mesh.mpi()), data_(data) {
    Lock lock = mpi_.lock();
    mesh_.buffers.insert(this);
  }
  ~MpiBuffer() override {
    Lock lock = mpi_.lock();
    cancel();
    settle(lock);
    mesh_.buffers.erase(this);
  }

  void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    Lock lock = mpi_.lock();
    mesh_.check_open(peer);
    mesh_.begin_send(peer, channel);
    sends_.push_back({peer, channel, bytes, {}});
    for_each_piece(bytes, [&](int64_t at, int64_t n) {
      sends_.back().pieces.push_back(
          mpi_.send(data_ + offset + at, n, mesh_.process(peer), mesh_.tag(channel)));
    });
  }
  void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    Lock lock = mpi_.lock();
    mesh_.check_open(peer);
    receives_.push_back({peer, channel, bytes, {}});
    for_each_piece(bytes, [&](int64_t at, int64_t n) {
      receives_.back().pieces.push_back(
          mpi_.recv(data_ + offset + at, n, mesh_.process(peer), mesh_.tag(channel)));
    });
  }
  void recv_any(uint64_t channel, int64_t offset, int64_t bytes) override {
    recv(-1, channel, offset, bytes);
  }
  void wait_send(TimePoint deadline) override {
    const auto ready = [&] { return is_done(sends_.front(), nullptr); };
    await(deadline, sends_, ready);
    mesh_.end_send(sends_.front().peer, sends_.front().channel);
    sends_.erase(sends_.begin());
  }
  int wait_recv(TimePoint deadline) override {
    int peer = -1;
    const auto ready = [&] {
      for (auto r = receives_.begin(); r != receives_.end(); ++r) {
        int source = -1;
        if (!is_done(*r, &source)) continue;
        receives_.erase(r);
        peer = mesh_.peer_of(source);
        return true;
      }
      return woken_.exchange(false);
    };
    await(deadline, receives_, ready);
    return peer;
  }
  void wake() override {
    woken_ = true;
    mpi_.news().notify_all();
  }

  // Have all receives ended, as received or as cancelled? The lock is held; the mesh is closed.
  bool receives_ended() {
    std::erase_if(receives_, [&](Operation& r) { return is_settled(r); });
    return receives_.empty();
  }
  // What can be; once, or Open MPI crashes. The lock is held.
  void cancel() {
    if (!mpi_.usable() || std::exchange(cancelled_, true)) return;
    for (Operation& r : receives_)
      for (MPI_Request& piece : r.pieces) mpi_.cancel(piece);
  }

 private:
  struct Operation {
    int peer;  // -1: any
    uint64_t channel;
    int64_t bytes;
    std::vector<MPI_Request> pieces;
  };
  using Operations = std::vector<Operation>;

  template <class F>
  void for_each_piece(int64_t bytes, const F& f) {
    int64_t at = 0;
    do {
      const int64_t n = std::min(mesh_.largest(), bytes - at);
      f(at, n);
      at += n;
    } while (at < bytes);
  }

  bool is_done(Operation& operation, int* source) {
    for (MPI_Request& piece : operation.pieces)
      if (piece != MPI_REQUEST_NULL && !mpi_.test(piece, source)) return false;
    return true;
  }

  template <class F>
  void await(TimePoint deadline, const Operations& pending, const F& ready) {
    int64_t bytes = 0;
    for (const Operation& o : pending) bytes += o.bytes;
    Pause pause(bytes);
    Lock lock = mpi_.lock();
    for (;;) {
      mesh_.check_open(-1);
      if (ready()) return;
      mesh_.look(false);
      for (const Operation& o : pending)
        if (mesh_.is_lost(o.peer)) {
          for (int i = 0; i < kLastLooks; ++i)
            if (ready()) return;
          mesh_.check_open(o.peer);
        }
      if (Clock::now() >= deadline) {
        mesh_.close_locked();
        throw DeadlinePassed("the deadline has passed");
      }
      pause.pause(lock, mpi_.news());
    }
  }

  bool is_settled(Operation& o) {
    try {
      return is_done(o, nullptr);
    } catch (const Error&) {  // it has ended, however
      return true;
    }
  }

  // Returns when MPI does not need the bytes any more.
  void settle(Lock& lock) {
    if (!mpi_.usable() || (sends_.empty() && receives_.empty())) return;
    const auto start = Clock::now();
    Pause pause(0);
    for (;;) {
      mesh_.look(true);
      receives_ended();
      std::erase_if(sends_, [&](Operation& o) {
        const bool ends = is_settled(o) || mesh_.takes_nothing(o.peer);
        if (ends) {
          for (MPI_Request& piece : o.pieces) mpi_.let_go(piece);
          mesh_.end_send(o.peer, o.channel);
        }
        return ends;
      });
      if (sends_.empty() && receives_.empty()) return;
      const auto is_of_dead = [&](const Operation& o) { return mesh_.has_ended(o.peer); };
      const bool all_dead =
          std::ranges::all_of(receives_, is_of_dead) && std::ranges::all_of(sends_, is_of_dead);
      if (Clock::now() - start >= (all_dead ? kSettleDead : kSettle)) break;
      pause.pause(lock, mpi_.news());
      if (!mpi_.usable()) return;
    }
    mpi_.give_up();
  }

  MpiMesh& mesh_;
  MpiProcess& mpi_;
  char* data_;
  Operations sends_, receives_;  // pending, in order
  std::atomic<bool> woken_ = false;
  bool cancelled_ = false;
};

std::unique_ptr<Mesh::Buffer> MpiMesh::buffer(void* data, int64_t) {
  return std::make_unique<MpiBuffer>(*this, static_cast<char*>(data));
}

void MpiMesh::close_locked() {
  if (closed_) return;
  closed_ = true;
  if (mpi_.usable()) {
    for (MpiBuffer* b : buffers) b->cancel();
    notify_all();
    say_takes_nothing();
  }
  mpi_.news().notify_all();
}

void MpiMesh::notify_all() {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_ || has_ended(p)) continue;  // who has closed waits for this notice
    MPI_Request request = mpi_.send(nullptr, 0, process(p), tag(kNotice));
    mpi_.let_go(request);
  }
}

// When it is so. It depends on receives alone, so that two that close do not wait for each other.
void MpiMesh::say_takes_nothing() {
  if (!closed_ || said_takes_nothing_ || !mpi_.usable()) return;
  if (!std::ranges::all_of(buffers, [](MpiBuffer* b) { return b->receives_ended(); })) return;
  said_takes_nothing_ = true;
  notify_all();
}

void MpiMesh::look(bool at_processes) {
  const auto now = Clock::now();
  at_processes |= now - watched_at_ >= kWatch;
  if (!at_processes && now - noticed_at_ < kNotices) return;
  noticed_at_ = now;
  if (at_processes) watched_at_ = now;
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    if (!takes_nothing_[p] && mpi_.usable() && mpi_.test(notices_[p])) {
      if (std::exchange(noticed_[p], true)) {
        takes_nothing_[p] = true;
      } else {
        lost_[p] = true;
        notices_[p] = mpi_.recv(nullptr, 0, process(p), tag(kNotice));
      }
    }
    lost_[p] = lost_[p] || (at_processes && job_->has_ended(ranks_[p]));
  }
  say_takes_nothing();
}

}  // namespace

std::unique_ptr<Mesh> connect_mpi_mesh(std::shared_ptr<MpiJob> job, int rank,
                                       std::vector<int> ranks, Store& store, Milliseconds timeout,
                                       int64_t largest) {
  MpiProcess& mpi = MpiProcess::get();
  int64_t number;
  {
    Lock lock = mpi.lock();
    number = mpi.proposed_number();
  }
  const Party party{.op = "mpi", .ranks = ranks, .rank = rank, .timeout = timeout};
  for (auto& text : exchange_texts(store, "number", std::to_string(number), party))
    number = std::max<int64_t>(number, std::stoll(text));
  if (number >= kNumbers) fail("[mpi] this process has made ", kNumbers, " groups");
  {
    Lock lock = mpi.lock();
    mpi.take_number(number);
  }
  return std::make_unique<MpiMesh>(std::move(job), rank, std::move(ranks), number, largest);
}

}  // namespace sherd::dist
