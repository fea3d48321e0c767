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
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "core/context.h"

namespace sherd::dist {
namespace {

namespace tp = gloo::transport;

// One device, that is one thread of Gloo's, serves all groups of a rank on one address.
struct Devices {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<tp::Device>> by_address;
};

std::shared_ptr<tp::Device> device_at(const std::string& address) {
  auto& devices = Context::current().state<Devices>();
  std::lock_guard lock(devices.mutex);
  auto device = devices.by_address[address].lock();
  if (device) return device;
  // [Note: SIGPIPE] Gloo writes to sockets that a peer may have closed. Its thread inherits this
  // thread's mask, and our progress threads set their own: so a write fails, and no signal comes,
  // without a change of the process's signal handling.
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  try {
    device = tp::tcp::CreateDevice(tp::tcp::attr(address.c_str()));
  } catch (const std::exception& e) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail("[gloo] cannot listen on address ", address, ": ", e.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  devices.by_address[address] = device;
  return device;
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
  GlooBuffer(std::unique_ptr<tp::UnboundBuffer> buffer, int rank, int size)
      : buffer_(std::move(buffer)), rank_(rank), size_(size) {}

  void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    try {
      buffer_->send(peer, channel, offset, bytes);
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }
  void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    try {
      buffer_->recv(peer, channel, offset, bytes);
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }
  void recv_any(uint64_t channel, int64_t offset, int64_t bytes) override {
    std::vector<int> peers;
    for (int r = 0; r < size_; ++r)
      if (r != rank_) peers.push_back(r);
    try {
      buffer_->recv(std::move(peers), channel, offset, bytes);
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }
  void wait_send(TimePoint deadline) override {
    try {
      buffer_->waitSend(until(deadline));
    } catch (const gloo::Exception& e) {
      rethrow(e, deadline);
    }
  }
  int wait_recv(TimePoint deadline) override {
    try {
      int peer = -1;
      return buffer_->waitRecv(&peer, until(deadline)) ? peer : -1;
    } catch (const gloo::Exception& e) {
      rethrow(e, deadline);
    }
  }
  void wake() override { buffer_->abortWaitRecv(); }
  void check_recv() override {
    try {
      buffer_->abortWaitRecv();  // the wait looks at errors first, then ends at once
      buffer_->waitRecv(nullptr, Milliseconds(1));
    } catch (const gloo::Exception& e) {
      rethrow(e);
    }
  }

 private:
  std::unique_ptr<tp::UnboundBuffer> buffer_;
  int rank_, size_;
};

class GlooMesh : public Mesh {
 public:
  GlooMesh(int rank, int size, Store& store, const std::string& address, Milliseconds timeout)
      : device_(device_at(address)), rank_(rank), size_(size) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + timeout;
    context_ = device_->createContext(rank, size);
    context_->setTimeout(std::max(Milliseconds(1), timeout / 5));  // Gloo connects for 5 times that
    try {
      std::string addresses;  // one for each peer, all of one length
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        const auto bytes = context_->createPair(r)->address().bytes();
        addresses.append(bytes.data(), bytes.size());
      }
      store.set(key(rank), addresses);
      await_all(store, std::max(Milliseconds(1), until(deadline)), timeout);
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        const std::string theirs = store.get(key(r));
        const size_t length = theirs.size() / (size - 1), place = rank > r ? rank - 1 : rank;
        const char* p = theirs.data() + place * length;
        context_->getPair(r)->connect(std::vector<char>(p, p + length));
      }
    } catch (const gloo::Exception& e) {
      fail("[gloo] rank ", rank, " of ", size, " at ", address,
           " could not connect to its peers: ", e.what());
    }
  }

  std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) override {
    return std::make_unique<GlooBuffer>(context_->createUnboundBuffer(data, bytes), rank_, size_);
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

 private:
  static std::string key(int rank) { return concat("address/", rank); }

  void await_all(Store& store, Milliseconds left, Milliseconds timeout) {
    std::vector<std::string> keys;
    for (int r = 0; r < size_; ++r) keys.push_back(key(r));
    try {
      store.wait(keys, left);
    } catch (const StoreTimeout&) {
      std::string missing;
      for (int r = 0; r < size_; ++r)
        if (!store.check({key(r)})) missing += concat(missing.empty() ? "" : ", ", r);
      fail("[gloo] rank ", rank_, " of ", size_, " waited ", timeout.count(),
           " ms for the others to come: missing are ranks ", missing, " (store ", store.name(),
           ")");
    }
  }

  std::shared_ptr<tp::Device> device_;
  std::shared_ptr<tp::Context> context_;
  int rank_, size_;
  std::atomic<bool> closed_ = false;
};

}  // namespace

std::unique_ptr<Mesh> connect_gloo_mesh(int rank, int size, Store& store,
                                        const std::string& address, Milliseconds timeout) {
  return std::make_unique<GlooMesh>(rank, size, store, address, timeout);
}

}  // namespace sherd::dist
