// MeshProcessGroup: a ProcessGroup over any Mesh: the queue, tags, deadlines and errors that all
// backends of host memory share. An Exchange moves the data.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "distributed/exchange.h"
#include "distributed/failure_record.h"
#include "distributed/flight_recorder.h"
#include "distributed/point_to_point.h"
#include "distributed/process_group.h"

namespace sherd {
class Context;
}

namespace sherd::dist {

class MeshProcessGroup : public ProcessGroup {
 public:
  struct Init {
    std::string backend, name;
    int rank;                            // in the group
    std::vector<int> ranks;              // global, by group rank
    std::unique_ptr<Mesh> mesh;          // null for a group of one
    std::unique_ptr<Exchange> exchange;  // null: messages over the mesh
    std::shared_ptr<Store> store;        // of this group alone
    Milliseconds timeout;
  };
  explicit MeshProcessGroup(Init init);
  ~MeshProcessGroup() override;

  std::string backend() const override { return backend_; }
  CollectiveCounts counts() const override;
  uint64_t sequence_number() const override;
  void refused(const std::string& text) override;

  Work broadcast(const Tensor& tensor, int root, Options) override;
  Work all_reduce(const Tensor& tensor, ReduceOp op, Options) override;
  Work all_reduce_coalesced(const std::vector<Tensor>& tensors, ReduceOp op, Options) override;
  Work reduce(const Tensor& tensor, int root, ReduceOp op, Options) override;
  Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input, Options) override;
  Work gather(const std::vector<Tensor>& outputs, const Tensor& input, int root, Options) override;
  Work scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root, Options) override;
  Work reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs, ReduceOp op,
                      Options) override;
  Work all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                  Options) override;
  Work barrier(Options) override;
  Work send(const Tensor& tensor, int destination, int tag, Options) override;
  Work recv(const Tensor& tensor, int source, int tag, Options) override;
  Work all_gather_pieces(const std::vector<Tensor>& full, const std::vector<Tensor>& pieces,
                         Options) override;
  Work reduce_scatter_pieces(const std::vector<Tensor>& pieces, const std::vector<Tensor>& full,
                             ReduceOp op, Options) override;
  void leave() override;

 private:
  using Body = std::function<void(Exchange&)>;
  struct Operation {
    CollectiveTag tag;
    std::vector<int> partners;
    CollectiveOptions options;
    Body body;
    Event done;
  };

  Work issue(const CollectiveTag& tag, std::vector<int> partners, Options options, Body body);
  void progress();
  void run(Operation& operation);
  bool next(Operation& operation);  // the next to run; false: there will be none
  void look_around();               // while idle: are the peers still there?
  // Makes this the group's failure, if it is the first, and returns what all calls throw from now.
  std::exception_ptr fail_group(const std::function<std::string()>& text);
  std::string explain(const CollectiveTag& tag, Milliseconds timeout, std::exception_ptr cause);
  std::string explain_lost(const FailureRecord::Where& here);
  PointToPoint& point_to_point(const char* op, const Tensor& tensor, int peer);
  // Runs what may refuse an argument.
  void check(const std::function<void()>& arguments);
  TimePoint deadline(const char* op, Options options) const;
  uint64_t last_sequence() const;
  std::vector<int> everyone() const;
  std::vector<int> star(int root) const;  // partners where all data come from or go to the root
  void check_member(const char* op) const;
  void check_root(const char* op, int root) const;
  void check_alive(const char* op) const;  // mutex_ held

  std::string backend_;
  std::unique_ptr<Mesh> mesh_;
  FailureRecord record_;
  FlightRecorder flight_;
  const bool checks_all_;                  // SHERD_DEBUG=collectives
  std::atomic<bool> was_refused_ = false;  // the call that is next: the store says why
  std::unique_ptr<Exchange> exchange_;
  Context& context_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  uint64_t sequence_ = 0;
  CollectiveCounts counts_;
  const std::shared_ptr<std::atomic<int64_t>> waited_ns_ = std::make_shared<std::atomic<int64_t>>();
  bool leaving_ = false;  // no more calls are taken
  bool drained_ = false;  // and no transfer is under way: once the queue is empty, the group ends
  bool closed_ = false;   // destroyed
  std::exception_ptr failed_;  // the first cause; none while all is well
  std::string failure_;        // its text
  CollectiveTag last_;         // of the latest that ran
  std::mutex failing_;         // one failure is explained at a time
  std::unique_ptr<PointToPoint> point_to_point_;
  std::thread thread_;
};

}  // namespace sherd::dist
