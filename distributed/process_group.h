// ProcessGroup: some ranks of a job, and the collectives among them. Every call returns a Work at
// once; tensors that it reads or writes must not be touched before `wait()`. The names and meanings
// are those of torch.distributed.
//
//     dist::init_process_group({.backend = "gloo"});   // env://: RANK, WORLD_SIZE, MASTER_ADDR, ..
//     Tensor x = full({4}, dist::rank());
//     dist::all_reduce(x);                             // default group, SUM, waits
//     dist::Work w = dist::all_reduce(x, dist::ReduceOp::kAvg, {.async = true});
//     w.wait();
//     auto pair = dist::new_group({0, 2});             // every rank of the job makes the same calls
//     if (pair->rank() >= 0) dist::broadcast(x, 0, {.group = pair});
//     dist::destroy_process_group();
//
// Ranks in arguments (root, source, destination) are ranks in the group. All ranks of a group issue
// the same collectives in the same order; each carries a tag (op, sequence number, dtype, element
// count, label) that is compared with the peers' before data are used, so that a mismatch is an
// error on every rank that names both sides, never a hang or a silent mix-up. Each has a deadline.
// Sums run over ranks in one fixed binary tree (see tree_sum.h): same bits on every run and
// backend. On the CPU a group runs its collectives one after another on a progress thread.
//
// Wrong arguments (a root that is no rank, a list of the wrong length, other dtypes within a list)
// are an Error of the call itself, before anything is sent. After a collective has failed
// (deadline, mismatch, a rank that left), every later call on the group throws at once and names
// that cause. Tensors may have any strides. Results raise the version of the tensors written,
// except in the two calls that end in _pieces.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "distributed/reduce_op.h"
#include "distributed/store.h"
#include "distributed/work.h"

namespace sherd::dist {

// What a caller may say about one collective.
struct CollectiveOptions {
  std::optional<Milliseconds> timeout = {};  // default: the group's
  // Part of the tag and of error messages: what the collective is for ("gather unit layers.3").
  // Empty: nothing.
  std::string label = {};
  // Run by the progress thread when the operation starts (its predecessors in the queue have ended)
  // and when it has ended, also after a failure. FSDP allocates outputs in the first and frees
  // inputs in the second, so that a queued operation reuses the bytes of the one before it.
  std::function<void()> on_start = nullptr, on_end = nullptr;
};

// Calls and payload bytes, by kind of collective, since the group was made. A coalesced call counts
// once.
struct CollectiveCounts {
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;  // payload: the full tensor's, whatever travels on the wire
  };
  Count all_gather, reduce_scatter, all_reduce, broadcast, other;
  int64_t waited_ns = 0;  // that callers stood in Work::wait() of collectives
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  int rank() const { return rank_; }  // of this rank in the group; -1 on ranks outside it
  int size() const { return int(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  // global ranks, by group rank
  const std::string& name() const { return name_; }
  virtual std::string backend() const = 0;
  virtual CollectiveCounts counts() const = 0;
  // Number of collectives issued so far: equal on all ranks of the group.
  virtual uint64_t sequence_number() const = 0;
  Milliseconds timeout() const { return timeout_; }  // of calls that give none
  // This rank was about to make the group's next collective, and an argument was refused with
  // `text`: peers that wait for it in vain get to know why. With SHERD_DEBUG=collectives it ends
  // the group at once. Calls of a group tell it by themselves.
  virtual void refused(const std::string&) {}

  using Options = const CollectiveOptions&;
  virtual Work broadcast(const Tensor& tensor, int root, Options = {}) = 0;
  virtual Work all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum, Options = {}) = 0;
  // Several at once, of maybe several dtypes; they may be without bytes until on_start has run.
  // Counts as one all_reduce.
  virtual Work all_reduce_coalesced(const std::vector<Tensor>& tensors,
                                    ReduceOp op = ReduceOp::kSum, Options = {}) = 0;
  virtual Work reduce(const Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
                      Options = {}) = 0;
  // outputs: one tensor a rank, any shapes that agree between ranks pairwise (outputs[r] has rank
  // r's input size).
  virtual Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input,
                          Options = {}) = 0;
  virtual Work gather(const std::vector<Tensor>& outputs, const Tensor& input, int root,
                      Options = {}) = 0;
  virtual Work scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root,
                       Options = {}) = 0;
  // inputs: one tensor a rank; inputs[r] has rank r's output size (sizes may differ between ranks).
  // Inputs are kept.
  virtual Work reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs,
                              ReduceOp op = ReduceOp::kSum, Options = {}) = 0;
  // outputs[r] from rank r, inputs[r] to rank r.
  virtual Work all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                          Options = {}) = 0;
  virtual Work barrier(Options = {}) = 0;
  // Point to point: outside the queue, matched by (source, tag) in order of issue. A send is done
  // when the bytes were received.
  virtual Work send(const Tensor& tensor, int destination, int tag = 0, Options = {}) = 0;
  virtual Work recv(const Tensor& tensor, int source, int tag = 0,
                    Options = {}) = 0;  // source -1: any; see Work::source()

  // One collective over several buffers (of maybe several dtypes), contiguous and one-dimensional,
  // each of size() equal pieces: full[i] gets every rank's piece. pieces[i] may be this rank's own
  // place in full[i] (then nothing is copied); tensors may be without bytes until on_start has run.
  virtual Work all_gather_pieces(const std::vector<Tensor>& full, const std::vector<Tensor>& pieces,
                                 Options = {}) = 0;
  // The reverse: pieces[i] gets the sum over ranks of this rank's place in full[i]. pieces[i] may
  // be this rank's own place in full[i], which is then left unspecified (a backend may use it as
  // room to work in), and is kept otherwise.
  virtual Work reduce_scatter_pieces(const std::vector<Tensor>& pieces,
                                     const std::vector<Tensor>& full, ReduceOp op = ReduceOp::kSum,
                                     Options = {}) = 0;

  // Ends the group in good order: waits for what was issued and lets the peers know. Later calls
  // are errors. Without it, a group that is destroyed looks to its peers like a rank that died.
  virtual void leave() = 0;

 protected:
  int rank_ = 0;
  std::vector<int> ranks_;
  std::string name_;
  Milliseconds timeout_ = kDefaultTimeout;
};
using Group = std::shared_ptr<ProcessGroup>;
// Null is a group of one.
inline int size_of_group(const Group& g) { return g ? g->size() : 1; }
inline int rank_in(const Group& g) { return g ? g->rank() : 0; }

}  // namespace sherd::dist
