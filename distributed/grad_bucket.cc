#include "distributed/grad_bucket.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "autograd/grad_mode.h"
#include "distributed/first_error.h"

namespace sherd::dist {
namespace {

Tensor flat_without_bytes(int64_t n, DType dtype, MemoryCategory category) {
  return over_storage(Storage::without_bytes(n * size_of(dtype), kCPU, category), {n}, dtype);
}

}  // namespace

GradBucket::GradBucket(std::vector<Entry> entries, Options options)
    : entries_(std::move(entries)), options_(std::move(options)), progress_(entries_.size()) {
  for (size_t i = 0; i < entries_.size(); ++i) index_[entries_[i].meta.get()] = int(i);
  const int ranks = size_of_group(options_.shard) * size_of_group(options_.replicate);
  if (options_.reduce_dtype == kFloat16)
    predivisor_ = std::exp2((std::bit_width(unsigned(ranks)) - 1 + 1) / 2);  // log2 halved, up
}

GradBucket::~GradBucket() {
  for (auto& w : works_) {
    try {
      w.wait();
    } catch (const Error&) {  // whoever waits for it in earnest has it thrown
    }
  }
}

void GradBucket::set_divisor(double divisor) {
  if (!(divisor > 0) || std::isinf(divisor))
    fail("[set_gradient_divide_factor] the factor must be a number above 0, got ", divisor);
  options_.divisor = divisor;
}

int GradBucket::index_of(autograd::AutogradMeta& leaf) const { return index_.at(&leaf); }

Tensor GradBucket::view(const Tensor& flat, int i) const {
  return over_storage(flat.storage(), entries_[i].shape, flat.dtype(), entries_[i].offset);
}

void GradBucket::make_buffer() {
  if (buffer_.defined()) return;
  MemoryScope scope(MemoryCategory::kGradients);
  buffer_ = empty({options_.padded}, options_.reduce_dtype);
  const int64_t size = size_of(buffer_.dtype());
  int64_t used = 0;
  auto zero_until = [&](int64_t end) {
    if (used < end) std::memset(buffer_.bytes() + used * size, 0, size_t((end - used) * size));
  };
  for (auto& e : entries_) {  // by rising offset
    zero_until(e.offset);
    used = std::max(used, e.offset + e.shape.numel());
  }
  zero_until(options_.padded);
}

void GradBucket::take_up_changes() {
  if (!pending_) return;
  bool any = false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Progress& p = progress_[i];
    if (!p.shown.defined()) continue;
    const Tensor& now = entries_[i].meta->grad;
    if (!now.defined()) {
      p = {};  // set to none: the next contribution is the first
    } else if (!now.is_same(p.shown)) {
      NoGrad off;
      p.shown.copy_(now.detach().reshape(p.shown.sizes()));
    }
    any = any || p.written;
  }
  if (!any) buffer_ = {}, pending_ = false;
}

void GradBucket::expect(const std::vector<autograd::AutogradMeta*>& leaves) {
  take_up_changes();
  expected_ = 0;
  was_expected_ = !leaves.empty();
  for (auto& p : progress_) p.expected = false;
  for (auto* leaf : leaves) {
    Progress& p = progress_[index_of(*leaf)];
    if (!p.expected) p.expected = true, ++expected_;
  }
}

GradBucket::Destination GradBucket::destination(autograd::AutogradMeta& leaf, DType dtype) {
  if (dtype != options_.reduce_dtype) return {};
  make_buffer();
  const int i = index_of(leaf);
  return {view(buffer_, i), std::exchange(progress_[i].written, true)};
}

void GradBucket::accept(autograd::AutogradMeta& leaf, const Tensor& g) {
  make_buffer();
  const int i = index_of(leaf);
  if (!(g.sizes() == entries_[i].shape))
    fail("[backward] the gradient of parameter ", entries_[i].name, " has shape ", g.sizes(),
         ", the parameter ", entries_[i].shape);
  NoGrad off;
  Tensor to = view(buffer_, i);
  if (std::exchange(progress_[i].written, true))
    to.add_(g.detach());
  else
    copy_raw(to, g);
}

void GradBucket::complete(autograd::AutogradMeta& leaf) {
  Progress& p = progress_[index_of(leaf)];
  if (!p.expected) return;
  p.expected = false;
  if (--expected_ == 0 && on_complete) on_complete();
}

void GradBucket::keep_pending() {
  if (!buffer_.defined()) return;
  pending_ = true;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Progress& p = progress_[i];
    if (!p.written || p.shown.defined()) continue;
    p.older = entries_[i].meta->grad;
    p.shown = view(buffer_, int(i));
    entries_[i].meta->grad = p.shown;
  }
}

void GradBucket::zero_unwritten() {
  for (size_t i = 0; i < entries_.size(); ++i)
    if (!progress_[i].written && entries_[i].shape.numel())
      copy_raw(view(buffer_, int(i)), Tensor(0));
}

Tensor GradBucket::finished(const Tensor& sum) const {
  NoGrad off;
  MemoryScope scope(MemoryCategory::kGradients);
  Tensor r = to_raw(sum, options_.grad_dtype);
  if (options_.divisor != predivisor_) r.div_(Tensor(options_.divisor / predivisor_));
  return r;
}

void GradBucket::prescale() {
  if (predivisor_ == 1) return;
  NoGrad off;
  buffer_.div_(Tensor(predivisor_));
}

void GradBucket::reduce(const std::vector<GradBucket*>& buckets, const std::string& label) {
  std::vector<GradBucket*> scattered, replicated;
  for (auto* b : buckets) {
    b->make_buffer();
    b->zero_unwritten();
    if (!b->exchange_) b->prescale();
    b->reducing_ = true;
    b->label_ = label;
    const int s = size_of_group(b->options_.shard), r = size_of_group(b->options_.replicate);
    if (s * r > 1) {
      b->flags_ = empty({int64_t(b->entries_.size())}, kInt32);
      for (size_t i = 0; i < b->entries_.size(); ++i)
        b->flags_.data<int32_t>()[i] = b->progress_[i].written;
    }
    if (b->exchange_) {
      b->exchange(label);
    } else if (s > 1)
      scattered.push_back(b);
    else if (r > 1)
      replicated.push_back(b);
    else
      b->result_ = b->finished(b->buffer_);
  }
  const auto finish_scattered = [scattered] {
    for (auto* b : scattered)
      if (b->sum_.storage()->has_bytes()) b->result_ = b->finished(b->sum_);
  };

  if (!scattered.empty()) {
    const Group& group = scattered[0]->options_.shard;
    const int64_t s = group->size();
    std::vector<Tensor> pieces, full;
    for (auto* b : scattered) {
      b->sum_ = flat_without_bytes(b->options_.padded / s, b->options_.reduce_dtype,
                                   MemoryCategory::kGradients);
      pieces.push_back(b->sum_), full.push_back(b->buffer_);
      const int64_t n = b->flags_.numel();
      Tensor spread = empty({s * n}, kInt32);
      for (int64_t k = 0; k < s; ++k)
        copy_raw(over_storage(spread.storage(), {n}, kInt32, k * n), b->flags_);
      b->flag_sums_ = empty({n}, kInt32);
      pieces.push_back(b->flag_sums_), full.push_back(spread);
    }
    CollectiveOptions o;
    o.label = label;
    o.on_start = [scattered] {
      for (auto* b : scattered) b->sum_.storage()->reallocate();
    };
    const Group& replicas = scattered[0]->options_.replicate;
    const bool is_hybrid = size_of_group(replicas) > 1;
    // On the progress thread, so that it overlaps with what backward computes next.
    o.on_end = [scattered, finish_scattered, is_hybrid] {
      for (auto* b : scattered)
        if (b->sum_.storage()->has_bytes()) b->buffer_.storage()->release();
      if (!is_hybrid) finish_scattered();
    };
    const Work work = group->reduce_scatter_pieces(pieces, full, ReduceOp::kSum, o);
    for (auto* b : scattered) b->works_.push_back(work);
    // The pieces' sums over replicas. The replicas' queue waits for the shards', never the other
    // way round, so the two cannot block each other.
    if (is_hybrid) {
      CollectiveOptions replicate;
      replicate.label = label;
      replicate.on_start = [work] { work.event().wait(); };
      replicate.on_end = finish_scattered;
      const Work sum = replicas->all_reduce_coalesced(pieces, ReduceOp::kSum, replicate);
      for (auto* b : scattered) b->works_.push_back(sum);
    }
  }

  // An all-reduce in two halves: between them each rank finishes only its own part.
  if (!replicated.empty()) {
    const Group& group = replicated[0]->options_.replicate;
    const int64_t r = group->size(), rank = group->rank();
    std::vector<Tensor> pieces, full;
    for (auto* b : replicated) {
      const int64_t c = b->options_.padded / r;
      full.push_back(b->buffer_);
      pieces.push_back(over_storage(b->buffer_.storage(), {c}, b->buffer_.dtype(), rank * c));
    }
    CollectiveOptions o;
    o.label = label;
    o.on_end = [pieces, replicated] {
      NoGrad off;
      for (size_t i = 0; i < pieces.size(); ++i) {
        const Options& options = replicated[i]->options_;
        const double divisor = options.divisor / replicated[i]->predivisor_;
        Tensor piece = pieces[i];
        if (options.reduce_dtype == options.grad_dtype && divisor != 1) piece.div_(Tensor(divisor));
      }
    };
    const Work first = group->reduce_scatter_pieces(pieces, full, ReduceOp::kSum, o);
    for (auto* b : replicated) b->works_.push_back(first);
    CollectiveOptions gather;
    gather.label = label;
    gather.on_end = [replicated] {
      for (auto* b : replicated) {
        const bool divided = b->options_.reduce_dtype == b->options_.grad_dtype;
        b->result_ = divided ? b->buffer_ : b->finished(b->buffer_);
      }
    };
    const Work second = group->all_gather_pieces(full, pieces, gather);
    for (auto* b : replicated) b->works_.push_back(second);
    for (auto* b : replicated) {
      b->flag_sums_ = b->flags_;
      b->works_.push_back(group->all_reduce(b->flag_sums_, ReduceOp::kSum, {.label = label}));
    }
  }
}

void GradBucket::exchange(const std::string& label) {
  const Group &shard = options_.shard, &replicate = options_.replicate;
  sum_ = buffer_;
  if (size_of_group(shard) > 1) {
    MemoryScope scope(MemoryCategory::kGradients);
    sum_ = empty({options_.padded / shard->size()}, options_.reduce_dtype);
  }
  exchanged_ = exchange_(buffer_, sum_);
  flag_sums_ = flags_;
  CollectiveOptions o;
  o.label = label;
  for (const Group& group : {shard, replicate}) {
    if (size_of_group(group) == 1) continue;
    const Work work = group->all_reduce_coalesced({flags_}, ReduceOp::kSum, o);
    o.on_start = [work] { work.event().wait(); };
    works_.push_back(work);
  }
}

// A result in bytes of its own is copied: it may be the hook's for longer.
void GradBucket::take_exchanged() {
  const Tensor r = std::exchange(exchanged_, {}).wait();
  if (!r.defined() || r.numel() != sum_.numel() || r.dtype() != sum_.dtype())
    fail("[", label_, "] the communication hook returned ",
         r.defined() ? concat("a tensor of ", r.numel(), " elements of ", r.dtype()) : "nothing",
         ": expected ", sum_.numel(), " of ", sum_.dtype(), ", as the bucket's output");
  const Tensor c = contiguous_raw(r);
  if (c.storage().get() != sum_.storage().get() || c.storage_offset() != 0)
    copy_raw(sum_, over_storage(c.storage(), sum_.sizes(), sum_.dtype(), c.storage_offset()));
  result_ = to_raw(sum_, options_.grad_dtype);
}

void GradBucket::retire(bool keep) {
  if (!reducing_) return;
  try {
    for (auto& w : works_) w.wait();
    if (exchange_) take_exchanged();
  } catch (...) {
    abort();
    throw;
  }
  works_.clear();
  reducing_ = false;
  FirstError errors;  // of hooks: the gradients after it are there all the same
  for (size_t i = 0; i < entries_.size(); ++i) errors.run([&] { write_gradient(int(i), keep); });
  buffer_ = sum_ = result_ = flags_ = flag_sums_ = {};
  pending_ = false;
  errors.rethrow();
}

void GradBucket::write_gradient(int i, bool keep) {
  NoGrad off;
  Entry& e = entries_[i];
  const Progress p = std::exchange(progress_[i], {});
  const bool contributed = p.written || (flag_sums_.defined() && flag_sums_.data<int32_t>()[i] > 0);
  const bool whole = size_of_group(options_.shard) == 1;
  const Dims shape = whole ? e.shape : Dims{e.owned.numel()};
  if (!keep || !contributed || e.owned.numel() == 0) {
    if (p.shown.defined()) e.meta->grad = p.older;
    // A rank without elements has no gradient, but its hooks run: those of others may wait for it.
    if (keep && contributed) autograd::run_post_hooks(*e.meta, empty(shape, result_.dtype()));
    return;
  }
  const Tensor g =
      over_storage(result_.storage(), shape, result_.dtype(), whole ? e.offset : e.owned.at);
  Tensor before = p.shown.defined() ? p.older : e.meta->grad;
  {
    MemoryScope scope(MemoryCategory::kGradients);
    if (before.defined())
      e.meta->grad = before.add_(g);
    else
      e.meta->grad = options_.gradients_are_views ? g : g.clone();
  }
  autograd::run_post_hooks(*e.meta, e.meta->grad);
}

void GradBucket::abort() {
  for (auto& w : works_) {
    try {
      w.wait();
    } catch (const Error&) {  // the backward that failed says so itself
    }
  }
  try {
    std::exchange(exchanged_, {}).wait();
  } catch (const std::exception&) {  // a hook's
  }
  // A pending sum has the failed backward's contributions in it: it goes, older gradients stay.
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (progress_[i].shown.defined()) entries_[i].meta->grad = progress_[i].older;
    progress_[i] = {};
  }
  works_.clear();
  reducing_ = pending_ = false;
  buffer_ = sum_ = result_ = flags_ = flag_sums_ = {};
  expected_ = 0;
}

}  // namespace sherd::dist
