#include "distributed/summon.h"

#include <exception>

#include "autograd/grad_mode.h"
#include "autograd/node.h"
#include "distributed/agree.h"

namespace sherd::dist {

struct SummonFullParams::Shown {
  Unit* unit;
  const Unit::Entry* entry;
  std::vector<Tensor> before;  // what the slots showed, by slot
  Tensor full;                 // undefined: not shown on this rank
  uint32_t version = 0;
  bool was_placeholder = false;
  bool keeps_gradient = false;  // `gradient` is this rank's part, while the whole is shown
  Tensor gradient;
  bool gradient_pending = false;  // on some rank of the shard group

  autograd::AutogradMeta& meta() const { return autograd::make_meta(entry->local); }
  bool cuts_gradient() const { return keeps_gradient && !gradient_pending; }
  bool is_cut() const { return size_of_group(unit->options().shard) > 1; }
};

namespace {

// This rank's elements of a whole tensor.
Tensor own_part(const Unit::Entry& e, const Tensor& whole) {
  const Tensor c = contiguous_raw(whole);
  return c.as_strided_raw({e.owned.numel()}, {1}, c.storage_offset() + e.owned.lo);
}

// For each flag, whether it is set on some rank of the group.
std::vector<bool> any_rank(const Group& group, const std::vector<bool>& flags,
                           const std::string& label) {
  Tensor t = zeros({int64_t(flags.size())}, kInt32);
  for (size_t i = 0; i < flags.size(); ++i) t.data<int32_t>()[i] = flags[i];
  if (!flags.empty() && size_of_group(group) > 1)
    group->all_reduce(t, ReduceOp::kMax, {.label = label}).wait();
  std::vector<bool> result;
  for (size_t i = 0; i < flags.size(); ++i) result.push_back(t.data<int32_t>()[i] != 0);
  return result;
}

}  // namespace

SummonFullParams::SummonFullParams(std::shared_ptr<Runtime> runtime, std::vector<int> units,
                                   const SummonOptions& options)
    : runtime_(std::move(runtime)), options_(options), exceptions_(std::uncaught_exceptions()) {
  if (options.rank0_only && options.writeback)
    fail(
        "[summon_full_params] rank0_only and writeback exclude each other: other ranks would keep "
        "their old parts");
  bool begun = false;
  try {
    all_or_none(runtime_->group(), [&] {
      runtime_->begin_summon();
      begun = true;
    });
    for (int u : units) summon(*runtime_->units()[u]);
  } catch (...) {
    if (begun) put_back();
    throw;
  }
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  if (options_.writeback && std::uncaught_exceptions() <= exceptions_) {
    try {
      write_back();
    } catch (...) {
      put_back();
      throw;
    }
  }
  put_back();
}

void SummonFullParams::summon(Unit& unit) {
  const Group& shard = unit.options().shard;
  const int s = size_of_group(shard);
  std::vector<Tensor> full, pieces;
  if (s > 1 && !options_.rank0_only) {
    MemoryScope scope(MemoryCategory::kParameters);
    for (auto& g : unit.groups()) {
      full.push_back(empty({g.layout->padded()}, g.master));
      pieces.push_back(g.piece);
    }
    if (!full.empty())
      shard->all_gather_pieces(full, pieces, {.label = "summon unit " + unit.name()}).wait();
  }
  const size_t first = shown_.size();
  for (auto place : unit.order()) {
    const Unit::Entry& e = unit.entry(place);
    Shown shown{&unit, &e, {}, {}, 0, e.local.impl()->placeholder, false, {}};
    for (nn::Slot* slot : e.slots) shown.before.push_back(slot->tensor);
    if (s == 1) {
      shown.full = e.local;
    } else if (options_.rank0_only) {
      const Tensor whole = unit.collect(e, e.local.detach(), 0);
      if (runtime_->group()->rank() == 0) shown.full = whole;
    } else {
      const FlatLayout& layout = *unit.groups()[place.first].layout;
      shown.full = over_storage(full[place.first].storage(), e.shape, e.local.dtype(),
                                layout.entries()[place.second].offset);
    }
    if (shown.full.defined()) {
      if (s == 1)
        e.local.impl()->placeholder = false;
      else
        autograd::share_meta(shown.full, e.local);
      shown.version = shown.full.version();
      for (nn::Slot* slot : e.slots) slot->tensor = shown.full;
    }
    shown_.push_back(std::move(shown));
  }
  if (options_.with_grads && s > 1) gather_gradients(unit, first);
}

void SummonFullParams::gather_gradients(Unit& unit, size_t first) {
  const Group& shard = unit.options().shard;
  // Two flags a parameter: is its gradient pending, is there a reduced one?
  std::vector<bool> here;
  for (size_t i = first; i < shown_.size(); ++i) {
    const Shown& p = shown_[i];
    const bool pending = unit.groups()[p.entry->place.first].bucket->is_pending(p.meta());
    here.push_back(pending);
    here.push_back(!pending && p.meta().grad.defined());
  }
  const auto anywhere = any_rank(shard, here, "summon gradients of " + unit.name());
  for (size_t i = first; i < shown_.size(); ++i) {
    const size_t flag = 2 * (i - first);
    Shown& p = shown_[i];
    p.gradient_pending = anywhere[flag];
    if (here[flag]) continue;  // shown as it is: the whole sum of this rank
    p.keeps_gradient = true;
    p.gradient = p.meta().grad;
    if (p.full.defined()) p.meta().grad = {};
  }
  NoGrad off;
  for (size_t i = first; i < shown_.size(); ++i) {
    Shown& p = shown_[i];
    if (p.gradient_pending || !anywhere[2 * (i - first) + 1]) continue;
    const Unit::Entry& e = *p.entry;
    const DType dtype = unit.groups()[e.place.first].bucket->grad_dtype();
    const Tensor part =
        p.gradient.defined() ? to_raw(p.gradient.detach(), dtype) : zeros({e.owned.numel()}, dtype);
    if (options_.rank0_only) {
      const Tensor whole = unit.collect(e, part, 0);
      if (p.full.defined()) p.meta().grad = whole;
      continue;
    }
    const FlatLayout& layout = *unit.groups()[e.place.first].layout;
    Tensor whole = empty(e.shape, dtype);
    std::vector<Tensor> parts;
    for (int k = 0; k < shard->size(); ++k) {
      const OwnedPart o = layout.owned(e.place.second, k);
      parts.push_back(over_storage(whole.storage(), {o.numel()}, dtype, o.lo));
    }
    shard->all_gather(parts, part, {.label = "summon gradient of " + e.name}).wait();
    p.meta().grad = whole;
  }
}

// What cannot be written back; empty: nothing.
std::string SummonFullParams::misfits() const {
  for (auto& p : shown_) {
    const Unit::Entry& e = *p.entry;
    for (nn::Slot* slot : e.slots) {
      if (!slot->tensor.defined())
        return concat("[fsdp] parameter ", e.name, " was taken out of its module");
      if (!slot->tensor.is_same(p.full) && !(slot->tensor.sizes() == e.shape))
        return concat("[fsdp] parameter ", e.name, " was replaced by a tensor of shape ",
                      slot->tensor.sizes(), ": expected its full shape ", e.shape);
    }
    const Tensor& gradient = p.meta().grad;
    if (p.cuts_gradient() && gradient.defined() && !(gradient.sizes() == e.shape))
      return concat("[fsdp] the gradient of ", e.name, " was replaced by one of shape ",
                    gradient.sizes(), ": expected the parameter's ", e.shape);
  }
  return "";
}

void SummonFullParams::write_back() {
  NoGrad off;
  throw_on_all(runtime_->group(), misfits());
  std::vector<bool> changed;
  for (const Shown& p : shown_) {
    changed.push_back(p.full.version() != p.version);
    for (nn::Slot* slot : p.entry->slots)
      if (!slot->tensor.is_same(p.full)) {
        copy_raw(p.full, slot->tensor);
        changed.back() = true;
      }
  }
  // FSDP decides by versions what to gather, on all ranks alike.
  changed = any_rank(runtime_->group(), changed, "write back " + runtime_->root().name());
  for (size_t i = 0; i < shown_.size(); ++i) {
    Shown& p = shown_[i];
    const Unit::Entry& e = *p.entry;
    if (changed[i]) {
      if (p.is_cut()) copy_raw(e.local, own_part(e, p.full));
      e.local.bump_version();
    }
    if (!p.cuts_gradient()) continue;
    const Tensor now = p.meta().grad;
    if (!now.defined() || e.owned.numel() == 0)
      p.gradient = {};
    else if (p.gradient.defined())
      copy_raw(p.gradient, own_part(e, now));
    else
      p.gradient = own_part(e, now).clone();
  }
}

void SummonFullParams::put_back() {
  for (auto& p : shown_) {
    if (p.keeps_gradient) p.meta().grad = p.gradient;
    for (size_t i = 0; i < p.entry->slots.size(); ++i) p.entry->slots[i]->tensor = p.before[i];
    p.entry->local.impl()->placeholder = p.was_placeholder;
  }
  shown_.clear();
  runtime_->end_summon();
}

}  // namespace sherd::dist
