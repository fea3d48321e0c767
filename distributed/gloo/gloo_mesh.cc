#include "distributed/gloo/gloo_mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/context.h"
#include "distributed/deadline.h"
#include "distributed/exchange_texts.h"

namespace sherd::dist {
namespace {

namespace tp = gloo::transport;

constexpr uint64_t kWatchChannel = 0;

class GlooBuffer;
class GlooMesh;

// [Note: watch] When a connection breaks, Gloo tells the buffers that wait for their turn on it,
// but not those of which some bytes have come or gone already: a wait for these would last until
// its deadline. So each mesh has one more receive posted from each peer, for which nothing is ever
// sent: it learns of the break, and a thread looks at these and wakes who waits in vain.
class Watch {
 public:
  Watch() : thread_([this] { run(); }) {}
  ~Watch() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(GlooMesh* mesh) {
    std::lock_guard lock(mutex_);
    meshes_.push_back(mesh);
  }
  void remove(GlooMesh* mesh) {
    std::lock_guard lock(mutex_);
    std::erase(meshes_, mesh);
  }

 private:
  static constexpr Milliseconds kPeriod{50};
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<GlooMesh*> meshes_;
  bool done_ = false;
  std::thread thread_;
};

// One endpoint, that is one thread of Gloo's and one watch, serves all groups of a rank.
struct Endpoint {
  std::shared_ptr<tp::Device> device;
  Watch watch;
};
struct Endpoints {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Endpoint>> by_address;
};

std::shared_ptr<Endpoint> endpoint_at(const std::string& address) {
  auto& endpoints = Context::current().state<Endpoints>();
  std::lock_guard lock(endpoints.mutex);
  auto endpoint = endpoints.by_address[address].lock();
  if (endpoint) return endpoint;
  // [Note: SIGPIPE] Gloo writes to sockets that a peer may have closed. Its thread inherits this
  // thread's mask, and our progress threads set their own: so a write fails, and no signal comes,
  // without a change of the process's signal handling.
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  std::string error;
  try {
    endpoint = std::make_shared<Endpoint>();
    endpoint->device = tp::tcp::CreateDevice(tp::tcp::attr(address.c_str()));
  } catch (const std::exception& e) {
    error = e.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!error.empty()) fail("[gloo] cannot listen on address ", address, ": ", error);
  endpoints.by_address[address] = endpoint;
  return endpoint;
}

// Gloo takes a time from now, in milliseconds; 0 would not even look.
Milliseconds until(TimePoint deadline) {
  using namespace std::chrono;
  const auto left = ceil<Milliseconds>(deadline - steady_clock::now());
  return std::clamp(left, Milliseconds(1), Milliseconds(hours(24 * 365)));
}

[[noreturn]] void rethrow(const std::exception& e, TimePoint deadline = TimePoint::max()) {
  if (std::chrono::steady_clock::now() >= deadline) throw DeadlinePassed(e.what());
  throw ConnectionLost(e.what());
}

class GlooBuffer : public Mesh::Buffer {
 public:
  GlooBuffer(GlooMesh& mesh, std::unique_ptr<tp::UnboundBuffer> buffer)
      : mesh_(mesh), buffer_(std::move(buffer)) {}

  void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    try {
      buffer_->send(peer, channel, offset, bytes);
      send_peers_.push_back(peer);
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }
  void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    try {
      buffer_->recv(peer, channel, offset, bytes);
      recv_peers_.push_back(peer);
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }
  void recv_any(uint64_t channel, int64_t offset, int64_t bytes) override;
  void wait_send(TimePoint deadline) override {
    wait(send_peers_, deadline,
         [&](int* peer) { return buffer_->waitSend(peer, until(deadline)); });
  }
  int wait_recv(TimePoint deadline) override {
    return wait(recv_peers_, deadline,
                [&](int* peer) { return buffer_->waitRecv(peer, until(deadline)); });
  }
  void wake() override { buffer_->abortWaitRecv(); }

  // The watch's: wakes a wait for a peer that is lost.
  void abort_if_lost(const std::vector<char>& lost) {
    for (int p : send_peers_)
      if (lost[p]) buffer_->abortWaitSend();
    for (int p : recv_peers_)
      if (lost[p]) buffer_->abortWaitRecv();
  }

 private:
  int wait(std::vector<int>& peers, TimePoint deadline, const std::function<bool(int*)>& wait_once);

  GlooMesh& mesh_;
  std::unique_ptr<tp::UnboundBuffer> buffer_;
  std::vector<int> send_peers_, recv_peers_;  // of what is pending
};

class GlooMesh : public Mesh {
 public:
  GlooMesh(Party party, Store& store, const std::string& address)
      : endpoint_(endpoint_at(address)),
        rank_(party.rank),
        size_(int(party.ranks.size())),
        lost_(size_) {
    const int rank = rank_, size = size_;
    context_ = endpoint_->device->createContext(rank, size);
    context_->setTimeout(
        until(deadline_after(party.timeout / 5)));  // Gloo connects for 5 times that
    try {
      std::string addresses;  // one for each peer, all of one length
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        const auto bytes = context_->createPair(r)->address().bytes();
        addresses.append(bytes.data(), bytes.size());
      }
      const std::vector<std::string> all = exchange_texts(store, "address", addresses, party);
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        const size_t length = all[r].size() / (size - 1), place = rank > r ? rank - 1 : rank;
        const char* p = all[r].data() + place * length;
        context_->getPair(r)->connect(std::vector<char>(p, p + length));
      }
      watched_.resize(size);
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        watched_[r] = context_->createUnboundBuffer(&watched_byte_, 1);
        watched_[r]->recv(r, kWatchChannel, 0, 1);
      }
      // Who goes on at once, and fails, must not look like one that could not be reached.
      await_all(store, "connected", party);
    } catch (const gloo::Exception& e) {
      fail("[gloo] rank ", rank, " of ", size, " at ", address,
           " could not connect to its peers: ", e.what());
    }
    endpoint_->watch.add(this);
  }
  ~GlooMesh() override { endpoint_->watch.remove(this); }

  std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) override {
    return std::make_unique<GlooBuffer>(*this, context_->createUnboundBuffer(data, bytes));
  }

  std::vector<int> lost_peers() override {
    std::lock_guard lock(mutex_);
    look();
    std::vector<int> list;
    for (int p = 0; p < size_; ++p)
      if (lost_[p]) list.push_back(p);
    return list;
  }

  // A wait whose time is up is the one way that Gloo's interface has to fail what is pending.
  void close() override {
    if (closed_.exchange(true)) return;
    char byte = 0;
    try {
      context_->createUnboundBuffer(&byte, 1)->waitRecv(nullptr, Milliseconds(0));
    } catch (const gloo::Exception&) {
    }
  }

  std::vector<int> peers() const {
    std::vector<int> list;
    for (int r = 0; r < size_; ++r)
      if (r != rank_) list.push_back(r);
    return list;
  }

  // ---- waits, known to the watch while they last
  void enter(GlooBuffer* buffer) {
    std::lock_guard lock(mutex_);
    waiting_.push_back(buffer);
  }
  void leave(GlooBuffer* buffer) {
    std::lock_guard lock(mutex_);
    std::erase(waiting_, buffer);
  }
  bool any_lost(const std::vector<int>& peers) {
    std::lock_guard lock(mutex_);
    return std::any_of(peers.begin(), peers.end(), [&](int p) { return lost_[p]; });
  }
  void watch() {
    std::lock_guard lock(mutex_);
    if (!look()) return;
    for (GlooBuffer* b : waiting_) b->abort_if_lost(lost_);
  }

 private:
  // Is any peer lost? mutex_ is held.
  bool look() {
    bool any = false;
    for (int p = 0; p < size_; ++p) {
      if (p != rank_ && !lost_[p]) try {
          watched_[p]->abortWaitRecv();  // the wait looks at errors first, then ends at once
          watched_[p]->waitRecv(nullptr, Milliseconds(1));
        } catch (const gloo::Exception&) {
          lost_[p] = true;
        }
      any = any || lost_[p];
    }
    return any;
  }

  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<tp::Context> context_;
  int rank_, size_;
  std::atomic<bool> closed_ = false;
  std::mutex mutex_;
  std::vector<char> lost_;
  std::vector<GlooBuffer*> waiting_;
  char watched_byte_ = 0;
  std::vector<std::unique_ptr<tp::UnboundBuffer>> watched_;
};

void GlooBuffer::recv_any(uint64_t channel, int64_t offset, int64_t bytes) {
  try {
    buffer_->recv(mesh_.peers(), channel, offset, bytes);
  } catch (const gloo::Exception& e) {
    rethrow(e);
  }
}

int GlooBuffer::wait(std::vector<int>& peers, TimePoint deadline,
                     const std::function<bool(int*)>& wait_once) {
  int peer = -1;
  try {
    // Meanwhile the watch reads `peers`.
    struct Entered {
      Entered(GlooMesh& mesh, GlooBuffer* buffer) : mesh(mesh), buffer(buffer) {
        mesh.enter(buffer);
      }
      ~Entered() { mesh.leave(buffer); }
      GlooMesh& mesh;
      GlooBuffer* buffer;
    } entered(mesh_, this);
    bool done = wait_once(&peer);
    // The watch may have woken a wait whose bytes were there: look once more.
    if (!done && mesh_.any_lost(peers)) {
      done = wait_once(&peer);
      if (!done) throw ConnectionLost("a peer is gone");
    }
    if (!done) return -1;
  } catch (const gloo::Exception& e) {
    rethrow(e, deadline);
  }
  if (const auto it = std::find(peers.begin(), peers.end(), peer); it != peers.end())
    peers.erase(it);
  return peer;
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [&] { return done_; }))
    for (GlooMesh* m : meshes_) m->watch();
}

}  // namespace

std::unique_ptr<Mesh> connect_gloo_mesh(int rank, std::vector<int> ranks, Store& store,
                                        const std::string& address, Milliseconds timeout) {
  return std::make_unique<GlooMesh>(
      Party{.op = "gloo", .ranks = std::move(ranks), .rank = rank, .timeout = timeout}, store,
      address);
}

}  // namespace sherd::dist
