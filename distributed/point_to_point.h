// PointToPoint: send and recv over a Mesh, beside the collectives, on a thread that the first call
// starts.
//
// [Note: point to point] A sender makes an offer (tag, dtype, shape, a number) and posts the bytes
// on a channel of that number. The receiver's thread matches offers with receives by (source, tag),
// each in order, takes the bytes straight into the tensor and answers "done", which ends the send.
// Everything that the thread waits for is one queue of letters from any peer; the bytes of a
// matched offer need no thread of the peer, so two threads never wait for each other, in whatever
// order tags are waited for.
#pragma once
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/tensor.h"
#include "distributed/flight_recorder.h"
#include "distributed/mesh.h"
#include "distributed/work.h"

namespace sherd {
class Context;
}

namespace sherd::dist {

class PointToPoint {
 public:
  // Ends the group: records the first cause, closes the mesh, and returns what all calls throw.
  using Fail = std::function<std::exception_ptr(const std::string& doing, std::exception_ptr)>;

  // `ranks`: global ranks by group rank, for messages.
  PointToPoint(Mesh& mesh, int rank, std::vector<int> ranks, FlightRecorder& flight, Fail fail);
  ~PointToPoint();  // after finish() or stop()

  Work send(const Tensor& tensor, int destination, int tag, TimePoint deadline);
  Work recv(const Tensor& tensor, int source, int tag, TimePoint deadline);  // source -1: any
  void finish();                        // waits for all that was issued
  void stop(std::exception_ptr cause);  // fails all that was issued. The mesh must be closed
  bool waits_for(int peer) const;       // is a transfer with that peer under way?

 private:
  struct Letter {  // plain bytes: it travels as it is
    enum Kind : int64_t { kOffer, kDone } kind = kOffer;
    uint64_t id = 0;
    int64_t tag = 0;
    DType dtype = kFloat32;
    int32_t dims = 0;
    int64_t sizes[kMaxDims] = {};

    Dims shape() const { return Dims(std::span(sizes, dims)); }
  };
  struct Mail {  // a letter being sent or received
    Letter letter;
    std::unique_ptr<Mesh::Buffer> buffer;
  };
  struct Transfer {
    bool sends;
    Tensor tensor;
    int peer, tag;
    TimePoint deadline;
    Event done = Event::pending();
    std::shared_ptr<int> source = std::make_shared<int>(-1);
    Tensor dense = {};
    uint64_t id = 0;      // of a send, at its destination
    uint64_t number = 0;  // in the flight record
    std::unique_ptr<Mesh::Buffer> bytes = nullptr;
    std::unique_ptr<Mail> offer = nullptr;
  };

  Work issue(Transfer transfer);
  void run();
  void take_issued();
  void await_letter();
  void start_send(Transfer transfer);
  void start_recv(Transfer transfer);
  void receive(Transfer transfer, int source, const Letter& offer);
  void finished(const Transfer& transfer);
  std::unique_ptr<Mail> post(int peer, const Letter& letter);
  std::string describe(const Transfer& t) const;
  int64_t global(int rank) const { return ranks_[rank]; }

  Mesh& mesh_;
  int rank_;
  std::vector<int> ranks_;
  FlightRecorder& flight_;
  Fail fail_;
  Context& context_;

  mutable std::mutex mutex_;
  std::deque<Transfer> issued_;  // by callers, for the thread
  bool started_ = false, finishing_ = false;
  std::exception_ptr stopped_;
  std::map<int, int> under_way_;  // transfers, by peer

  // The thread's own.
  std::unique_ptr<Mail> inbox_;
  std::list<Transfer> sends_, recvs_;
  struct Offer {
    int source;
    Letter letter;
  };
  std::list<Offer> offers_;  // not yet asked for
  std::vector<std::unique_ptr<Mail>> answers_;
  std::vector<uint64_t> next_id_;
  std::thread thread_;
};

}  // namespace sherd::dist
