#include "distributed/unit.h"

#include <cstring>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "core/generator.h"
#include "core/philox.h"

namespace sherd::dist {
namespace {

class UnitShardInfo : public nn::ShardInfo {
 public:
  UnitShardInfo(Group group, std::string name, Dims shape, std::shared_ptr<const UnitLayout> layout,
                int parameter)
      : group_(std::move(group)),
        name_(std::move(name)),
        shape_(shape),
        layout_(std::move(layout)),
        parameter_(parameter),
        part_(layout_->owned(parameter, group_->rank())) {}
  Dims full_shape() const override { return shape_; }
  int64_t begin() const override { return part_.lo; }
  int64_t end() const override { return part_.hi; }
  std::string name() const override { return name_; }
  const void* group() const override { return group_.get(); }
  void sum_exact(const Tensor& values) const override {
    group_->all_reduce(values, ReduceOp::kSum, {.label = "gradient norm"}).wait();
  }
  void max(const Tensor& values) const override {
    group_->all_reduce(values, ReduceOp::kMax, {.label = "gradient norm"}).wait();
  }
  int ranks() const override { return group_->size(); }
  int rank() const override { return group_->rank(); }
  std::pair<int64_t, int64_t> part(int rank) const override {
    const OwnedPart p = layout_->owned(parameter_, rank);
    return {p.lo, p.hi};
  }
  void all_to_all(const std::vector<Tensor>& outputs,
                  const std::vector<Tensor>& inputs) const override {
    group_->all_to_all(outputs, inputs, {.label = "whole matrices"}).wait();
  }

 private:
  Group group_;
  std::string name_;
  Dims shape_;
  std::shared_ptr<const UnitLayout> layout_;
  int parameter_;  // in the layout
  OwnedPart part_;
};

void refuse_conversion(const Unit::Entry& e, DType now, DType expected) {
  if (now != expected)
    fail("[fsdp] parameter ", e.name, " was converted from ", expected, " to ", now,
         " after wrapping: convert the model before it is wrapped, or use mixed_precision");
}

}  // namespace

Unit::Unit(nn::Module& module, std::string name, const std::vector<nn::Slot*>& slots,
           const UnitOptions& options, uint64_t seed)
    : module_(&module), name_(std::move(name)), options_(options) {
  std::vector<Entry> entries;
  std::unordered_map<TensorImpl*, size_t> known;
  for (nn::Slot* s : slots) {
    auto [it, fresh] = known.emplace(s->tensor.impl(), entries.size());
    if (!fresh) {
      entries[it->second].slots.push_back(s);
      continue;
    }
    Entry e;
    e.slots = {s};
    e.name = s->full_name();
    e.shape = s->tensor.sizes();
    e.local = s->tensor;
    entries.push_back(std::move(e));
  }
  std::vector<FlatParameter> parameters;
  for (auto& e : entries) {
    FlatParameter p;
    for (auto* s : e.slots) p.names.push_back(s->full_name());
    p.shape = e.shape, p.dtype = e.local.dtype(), p.requires_grad = e.local.requires_grad();
    parameters.push_back(std::move(p));
  }
  const int s = size_of_group(options_.shard), r = size_of_group(options_.replicate);
  // With replicas only, the flat gradient is padded for an all-reduce in two halves: see
  // GradBucket.
  layout_ = std::make_shared<const UnitLayout>(parameters, s == 1 ? r : s);
  order_.resize(entries.size());
  for (auto& layout : layout_->groups()) {
    FlatGroup g;
    g.layout = &layout;
    g.master = layout.dtype();
    g.compute = options_.precision.param_dtype.value_or(g.master);
    g.whole = s == 1 && g.compute == g.master;
    const int64_t c = s == 1 ? layout.padded() : layout.piece();
    MemoryScope scope(MemoryCategory::kParameters);
    g.piece = zeros({c}, g.master);
    if (g.whole) {
      g.full = g.own = g.piece;
    } else {
      const int64_t n = layout.padded();
      g.full = over_storage(
          Storage::without_bytes(n * size_of(g.compute), kCPU, MemoryCategory::kParameters), {n},
          g.compute);
      g.own =
          over_storage(g.full.storage(), {c}, g.compute, s == 1 ? 0 : rank_in(options_.shard) * c);
    }
    for (size_t i = 0; i < layout.entries().size(); ++i) {
      const FlatLayout::Entry& at = layout.entries()[i];
      Entry e = entries[at.parameter];
      e.owned = s == 1 ? OwnedPart{0, at.numel, at.offset}
                       : layout.owned(int(i), rank_in(options_.shard));
      order_[at.parameter] = e.place = {int(groups_.size()), int(i)};
      cut(g, e, seed);
      g.entries.push_back(std::move(e));
    }
    groups_.push_back(std::move(g));
  }
  for (auto& g : groups_) attach(g);
}

Unit::~Unit() {
  if (!in_flight_) return;
  try {
    gathering_.wait();      // it writes into the buffers
  } catch (const Error&) {  // nobody is left to be told
  }
}

// Fills this rank's part of the piece, and turns the parameter's Tensor into a view of it.
void Unit::cut(FlatGroup& g, Entry& e, uint64_t seed) {
  nn::Slot& first = e.slots[0]->tied_to ? *e.slots[0]->tied_to : *e.slots[0];
  NoGrad off;
  const Tensor part = over_storage(g.piece.storage(), {e.owned.numel()}, g.master, e.owned.at);
  if (first.declared) {
    const std::string name = first.full_name();
    const uint64_t key = philox_key(seed, name.data(), name.size());
    if (first.init.whole) {
      Tensor whole = empty(e.shape, g.master);
      first.init.fill(key, 0, whole);
      copy_raw(part, over_storage(whole.storage(), {e.owned.numel()}, g.master, e.owned.lo));
    } else {
      first.init.fill(key, e.owned.lo, part);
    }
  } else {
    Tensor whole = contiguous_raw(e.local);
    if (options_.sync_module_states) {
      whole = whole.clone();
      for (const Group& group : {options_.shard, options_.replicate})
        if (size_of_group(group) > 1)
          group->broadcast(whole, 0, {.label = "sync_module_states " + e.name}).wait();
    }
    copy_raw(part,
             whole.as_strided_raw({e.owned.numel()}, {1}, whole.storage_offset() + e.owned.lo));
  }
  const bool keeps_shape = size_of_group(options_.shard) == 1;
  e.local.set_data(over_storage(g.piece.storage(), local_shape(e), g.master, e.owned.at));
  e.local.set_grad({});
  e.local.impl()->placeholder = !keeps_shape || !g.whole;
  autograd::make_meta(e.local).name = e.name;
  if (g.whole) {
    e.full = e.local;
  } else {
    const int64_t offset = g.layout->entries()[g.entries.size()].offset;
    e.full = over_storage(g.full.storage(), e.shape, g.compute, offset);
    autograd::share_meta(e.full, e.local);
  }
  for (nn::Slot* s : e.slots) s->declared = false, s->tensor = e.local;
  by_full_[e.full.family().get()] = {int(groups_.size()), int(g.entries.size())};
}

void Unit::attach(FlatGroup& g) {
  const bool sharded = size_of_group(options_.shard) > 1;
  std::vector<GradBucket::Entry> entries;
  for (size_t i = 0; i < g.entries.size(); ++i) {
    const Entry& e = g.entries[i];
    autograd::AutogradMeta& meta = autograd::make_meta(e.local);
    if (sharded)
      meta.shard = Ref<Counted>(new UnitShardInfo(options_.shard, e.name, e.shape, layout_,
                                                  g.layout->entries()[i].parameter));
    entries.push_back({Ref<autograd::AutogradMeta>(&meta), e.name, e.shape,
                       g.layout->entries()[i].offset, e.owned});
  }
  GradBucket::Options o;
  o.padded = g.layout->padded();
  o.reduce_dtype = options_.precision.reduce_dtype.value_or(g.compute);
  o.grad_dtype = options_.precision.keep_low_precision_grads ? o.reduce_dtype : g.master;
  o.shard = options_.shard, o.replicate = options_.replicate;
  o.divisor = double(size_of_group(o.shard)) * size_of_group(o.replicate);
  g.bucket = std::make_shared<GradBucket>(std::move(entries), o);
  for (auto& e : g.entries) autograd::make_meta(e.local).sink = g.bucket;
}

const Unit::Entry* Unit::find_full(const Tensor& t) const {
  auto it = by_full_.find(t.impl()->family.get());
  return it == by_full_.end() ? nullptr : &entry(it->second);
}

bool Unit::gathers() const {
  for (auto& g : groups_)
    if (!g.whole) return true;
  return false;
}
int64_t Unit::full_bytes() const {
  int64_t n = 0;
  for (auto& g : groups_) n += g.whole ? 0 : g.full.nbytes();
  return n;
}
int64_t Unit::gradient_bytes() const {
  int64_t n = 0;
  for (auto& g : groups_) n += g.layout->requires_grad() ? g.bucket->reduced_bytes() : 0;
  return n;
}
int64_t Unit::num_parameters() const {
  int64_t n = 0;
  for (auto& g : groups_) n += g.layout->numel();
  return n;
}

uint32_t Unit::piece_version() const {
  uint32_t v = 0;
  for (auto& g : groups_)
    for (auto& e : g.entries) v += e.local.version();
  return v;
}
bool Unit::is_stale() const { return piece_version() != gathered_version_; }

void Unit::gather(const std::string& label) {
  if (in_flight_ || shown_) return;
  gathered_version_ = piece_version();
  std::vector<FlatGroup*> groups;
  for (auto& g : groups_)
    if (!g.whole) groups.push_back(&g);
  auto fill = [groups] {
    for (auto* g : groups) {
      g->full.storage()->reallocate();
      copy_raw(g->own, g->piece);  // cast before the exchange: low precision halves its bytes
    }
  };
  if (size_of_group(options_.shard) == 1) {
    fill();
    gathering_ = Work();
  } else {
    std::vector<Tensor> full, own;
    for (auto* g : groups) full.push_back(g->full), own.push_back(g->own);
    CollectiveOptions o;
    o.label = label;
    o.on_start = fill;
    gathering_ = options_.shard->all_gather_pieces(full, own, o);
  }
  in_flight_ = true;
}

void Unit::wait() {
  if (!in_flight_) return;
  in_flight_ = false;
  gathering_.wait();
}

void Unit::show() {
  wait();
  if (shown_) return;
  shown_ = true;
  for (auto& g : groups_)
    for (auto& e : g.entries)
      for (nn::Slot* s : e.slots) s->tensor = e.full;
  for (auto& g : groups_)
    for (auto& e : g.entries) e.shown_version = e.full.version();
  set_usable(true);
}

const Unit::Entry* Unit::changed_full() const {
  if (!shown_) return nullptr;
  for (auto& g : groups_)
    for (auto& e : g.entries)
      if (!g.whole && e.full.version() != e.shown_version) return &e;
  return nullptr;
}

void Unit::detach_module() {
  for (auto& g : groups_)
    for (auto& e : g.entries) e.slots.clear();
}

void Unit::detach_sinks() {
  for (auto& g : groups_) {
    g.bucket->on_complete = nullptr;
    for (auto& e : g.entries) autograd::make_meta(e.local).sink = nullptr;
  }
}

void Unit::set_usable(bool usable) {
  for (auto& g : groups_)
    if (!g.whole)
      for (auto& e : g.entries) e.full.impl()->placeholder = !usable;
}

void Unit::release() {
  if (in_flight_) {
    in_flight_ = false;
    try {
      gathering_.wait();
    } catch (const Error&) {  // released after a failure, which was thrown where it was waited for
    }
  }
  shown_ = false;
  for (auto& g : groups_) {
    for (auto& e : g.entries)
      for (nn::Slot* s : e.slots) s->tensor = e.local;
    if (!g.whole) g.full.storage()->release(current_stream(kCPU).record());
  }
}

void Unit::check_slots() {
  for (auto& g : groups_)
    for (auto& e : g.entries) {
      const Tensor& shown = shown_ ? e.full : e.local;
      for (nn::Slot* s : e.slots) {
        if (s->tensor.is_same(shown)) continue;
        take_over(g, e, s->tensor);
        s->tensor = shown;
      }
      if (e.local.storage().get() != g.piece.storage().get()) {
        refuse_conversion(e, e.local.dtype(), g.master);
        take_over(g, e, e.local);
        e.local.set_data(over_storage(g.piece.storage(), local_shape(e), g.master, e.owned.at));
      }
      if (!g.whole && e.full.storage().get() != g.full.storage().get()) {
        refuse_conversion(e, e.full.dtype(), g.compute);
        take_over(g, e, e.full);
        const int64_t offset = g.layout->entries()[size_t(e.place.second)].offset;
        by_full_.erase(e.full.family().get());
        e.full.set_data(over_storage(g.full.storage(), e.shape, g.compute, offset));
        by_full_[e.full.family().get()] = e.place;
        e.shown_version = e.full.version();
      }
    }
}

Dims Unit::local_shape(const Entry& e) const {
  return size_of_group(options_.shard) == 1 ? e.shape : Dims{e.owned.numel()};
}

// Copies the user's values, whole or of this rank's part, into the piece.
void Unit::take_over(FlatGroup& g, Entry& e, const Tensor& values) {
  const Tensor now = contiguous_raw(values);
  int64_t offset = now.storage_offset();
  if (now.sizes() != local_shape(e)) {
    if (now.sizes() != e.shape)
      fail("[fsdp] parameter ", e.name, " was replaced by a tensor of shape ", now.sizes(),
           ": expected its full shape ", e.shape, ", or this rank's part ", local_shape(e));
    offset += e.owned.lo;
  }
  NoGrad off;
  copy_raw(over_storage(g.piece.storage(), {e.owned.numel()}, g.master, e.owned.at),
           now.as_strided_raw({e.owned.numel()}, {1}, offset));
  e.local.bump_version();
}

Tensor Unit::collect(const Entry& e, const Tensor& local, int root) const {
  const int s = size_of_group(options_.shard);
  if (s == 1) return local.detach().reshape(e.shape);
  const bool here = rank_in(options_.shard) == root;
  const FlatLayout& layout = *groups_[e.place.first].layout;
  Tensor whole;
  std::vector<Tensor> parts;
  if (here) {
    whole = empty(e.shape, local.dtype());
    for (int k = 0; k < s; ++k) {
      const OwnedPart p = layout.owned(e.place.second, k);
      parts.push_back(over_storage(whole.storage(), {p.numel()}, local.dtype(), p.lo));
    }
  }
  options_.shard->gather(parts, contiguous_raw(local), root, {.label = "collect " + e.name}).wait();
  return whole;
}

}  // namespace sherd::dist
