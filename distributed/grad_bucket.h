// GradBucket: a flat gradient of some parameters and its reduction over ranks. FSDP has one a unit
// and group of dtypes, DDP some of a bounded size; both are this one engine.
//
//     bucket->expect({meta, ...});                    // a backward starts: who will contribute
//     ...                                           // the engine hands contributions to this sink
//     -> on_complete()                                // the last expected leaf is complete
//     GradBucket::reduce({bucket}, "unit layers.0");  // issue: sum over ranks, cast up, divide
//     bucket->retire();                               // wait, and write each parameter's grad
//
// [Note: what a leaf shows] Contributions are summed locally in reduce_dtype (the first is
// assigned, not added to zero), exchanged once, cast to the master's dtype and divided there, and
// only then added to an older gradient. Sums in float16 are of gradients that were divided by a
// part of W, a power of two, before: large sums do not overflow, and small gradients do not vanish.
// A backward without exchange (no_sync) leaves the local sum `pending`: grad then shows it in the
// parameter's full shape.
#pragma once
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/meta.h"
#include "distributed/flat_layout.h"
#include "distributed/future.h"
#include "distributed/process_group.h"

namespace sherd::dist {

class GradBucket : public autograd::GradSink {
 public:
  struct Entry {
    Ref<autograd::AutogradMeta> meta;
    std::string name;
    Dims shape;
    int64_t offset = 0;  // in the flat gradient
    OwnedPart owned;     // what this rank keeps of the sum
  };
  struct Options {
    int64_t padded = 0;  // elements of the flat gradient, a multiple of the shard group's size
    DType reduce_dtype = kFloat32;  // of the flat gradient and of the sum
    DType grad_dtype = kFloat32;    // of what grad shows in the end
    Group shard, replicate;         // null: a group of one
    double divisor = 1;
    bool gradients_are_views = true;  // of the whole sum; otherwise each has bytes of its own
  };

  GradBucket(std::vector<Entry> entries, Options options);
  ~GradBucket() override;

  // Called when the last expected leaf is complete.
  std::function<void()> on_complete;

  // What the user did to pending gradients since they were shown: set to none, replaced.
  void take_up_changes();
  // Starts a backward in which the leaves of these metas get gradients. Takes up changes first.
  void expect(const std::vector<autograd::AutogradMeta*>& leaves);
  int expected() const { return expected_; }  // leaves still to complete
  bool was_expected() const { return was_expected_; }
  bool is_pending() const { return pending_; }
  // Of this leaf: its grad shows this rank's pending sum, or would if it was not set to none.
  bool is_pending(autograd::AutogradMeta& leaf) const {
    return progress_[index_of(leaf)].shown.defined();
  }

  // ---- GradSink
  Destination destination(autograd::AutogradMeta& leaf, DType dtype) override;
  void accept(autograd::AutogradMeta& leaf, const Tensor& contribution) override;
  void complete(autograd::AutogradMeta& leaf) override;

  // The backward ends without exchange: grad shows the local sums.
  void keep_pending();
  // Issues the reduction of some buckets as one collective a group of ranks. A collective: every
  // rank calls it for the same buckets, with contributions or without.
  static void reduce(const std::vector<GradBucket*>& buckets, const std::string& label);
  // keep: writes each parameter's grad. Otherwise they are what they were before this backward.
  // Error of the exchange, if it failed: then as after abort(). That of a hook comes when the
  // gradients of all parameters were written.
  void retire(bool keep = true);
  // After a failed backward: waits out a reduction, drops what was collected, pending sums too.
  // Gradients that were reduced before stay.
  void abort();

  int64_t reduced_bytes() const { return options_.padded * size_of(options_.reduce_dtype); }
  DType grad_dtype() const { return options_.grad_dtype; }
  const std::vector<Entry>& entries() const { return entries_; }
  // What the sum over ranks is divided by; default: the number of ranks. Error unless above 0.
  void set_divisor(double divisor);
  double divisor() const { return options_.divisor; }
  // Instead of sum and division: gets the flat gradient, in which what nobody wrote is zero, and
  // where the result is wanted (the flat gradient itself, or this rank's piece), and says what the
  // result is, of that size and dtype.
  using Exchange = std::function<Future(const Tensor& flat, const Tensor& output)>;
  void set_exchange(Exchange exchange) { exchange_ = std::move(exchange); }
  bool has_exchange() const { return bool(exchange_); }

 private:
  struct Progress {
    bool written = false;  // the buffer holds a contribution of this entry
    bool expected = false;
    Tensor shown;  // the pending view that grad shows
    Tensor older;  // the gradient that the pending one stands before
  };

  int index_of(autograd::AutogradMeta& leaf) const;
  Tensor view(const Tensor& flat, int entry) const;
  void make_buffer();
  void zero_unwritten();
  Tensor finished(const Tensor& sum) const;  // cast up and divided, in place where dtypes allow
  void prescale();
  void exchange(const std::string& label);
  void take_exchanged();
  void write_gradient(int entry, bool keep);  // and runs its hooks

  std::vector<Entry> entries_;
  Options options_;
  double predivisor_ = 1;  // of the divisor: what contributions are divided by before the exchange
  std::unordered_map<autograd::AutogradMeta*, int> index_;
  std::vector<Progress> progress_;
  int expected_ = 0;
  bool was_expected_ = false, pending_ = false, reducing_ = false;
  Tensor buffer_;  // [padded] in reduce_dtype; undefined: nothing contributed
  // ---- the reduction in flight
  Tensor sum_, result_;       // [c] in reduce_dtype; in grad_dtype, divided
  Tensor flags_, flag_sums_;  // a number an entry: how many ranks contributed
  std::vector<Work> works_;
  Exchange exchange_;
  Future exchanged_;
  std::string label_;  // of the latest reduction
};

}  // namespace sherd::dist
