#include "distributed/ddp.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <unordered_set>

#include "autograd/grad_mode.h"
#include "core/context.h"
#include "distributed/agree.h"
#include "distributed/agree_bf16.h"
#include "distributed/broadcast_coalesced.h"
#include "distributed/distributed.h"
#include "distributed/first_error.h"
#include "distributed/verify_models.h"

namespace sherd::dist {
namespace {

// What a rank tells a Join, beside JoinIteration::kExchanges.
constexpr int64_t kBroadcastsBuffers = 2;

}  // namespace

// Notes in which order parameters are complete, until buckets are made in that order.
class DdpReducer::OrderedBucket : public GradBucket {
 public:
  OrderedBucket(DdpReducer& reducer, std::vector<Entry> entries, Options options)
      : GradBucket(std::move(entries), std::move(options)), reducer_(reducer) {}
  void complete(autograd::AutogradMeta& leaf) override {
    if (reducer_.rebuild_due_ && reducer_.syncs_now_)
      reducer_.ready_.push_back(reducer_.index_.at(&leaf));
    GradBucket::complete(leaf);
  }

 private:
  DdpReducer& reducer_;
};

// ---- construction
DdpReducer::DdpReducer(nn::Module& module, const DdpOptions& options)
    : options_(options), module_(&module.state()) {
  group_ = options.process_group ? options.process_group : default_group();
  if (group_->rank() < 0) fail("[ddp] this rank is not in the process group ", group_->name());
  divisor_ = group_->size();
  nn::Module::NamedTensors managed;
  const auto take = [&] { managed = take_parameters(module); };
  if (options_.init_sync)
    all_or_none(group_, take);
  else
    take();
  if (options_.init_sync && group_->size() > 1) {
    verify(module, managed);
    if (std::ranges::any_of(managed, [](auto& p) { return p.second.dtype() == kBFloat16; }))
      agree_on_bf16_products(group_);
    std::vector<Tensor> all = buffers();
    for (auto& [name, p] : managed) all.push_back(p);
    broadcast_coalesced(group_, all, 0, "ddp construction");
  }
  // Backward meets them about in the reverse of the order in which they were declared.
  std::vector<int> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  build(order);
  // With unused parameters the order may be another in each step.
  rebuild_due_ = group_->size() > 1 && buckets_.size() > 1 &&
                 (options_.static_graph || !options_.find_unused_parameters);
  autograd::add_observer(this);
}

DdpReducer::~DdpReducer() {
  autograd::remove_observer(this);
  for (auto& [meta, i] : index_) meta->sink = nullptr;
}

nn::Module::NamedTensors DdpReducer::managed_parameters(const nn::Module& module) const {
  std::unordered_set<const TensorImpl*> ignored;
  for (const Tensor& t : options_.ignored_parameters) ignored.insert(t.impl());
  nn::Module::NamedTensors all = module.named_parameters();
  std::erase_if(all, [&](auto& named) { return ignored.contains(named.second.impl()); });
  return all;
}

// What may be wrong on this rank alone, before the first collective.
nn::Module::NamedTensors DdpReducer::take_parameters(nn::Module& module) {
  if (!(options_.bucket_cap_mb > 0) || std::isinf(options_.bucket_cap_mb))
    fail("[ddp] bucket_cap_mb must be a number of MiB above 0, got ", options_.bucket_cap_mb);
  if (options_.first_bucket_bytes <= 0)
    fail("[ddp] first_bucket_bytes must be above 0, got ", options_.first_bucket_bytes);
  module.materialize();
  for (nn::Slot* s : module.slots())
    if (s->is_buffer && s->tensor.defined()) buffers_.push_back(s);
  const nn::Module::NamedTensors managed = managed_parameters(module);
  for (auto& [name, p] : managed)
    if (p.requires_grad()) {
      autograd::AutogradMeta& meta = autograd::make_meta(p);
      if (meta.sink)
        fail("[ddp] parameter ", name,
             " is in another parallel wrapper already: put it into ignored_parameters if that one "
             "is to reduce its gradient");
      if (meta.name.empty()) meta.name = name;
      index_[&meta] = int(parameters_.size());
      parameters_.emplace_back(name, p);
    } else {
      frozen_.emplace_back(name, p);
    }
  if (parameters_.empty())
    fail("[ddp] ", module.type_name(), " has no parameter that requires a gradient");
  return managed;
}

void DdpReducer::verify(const nn::Module& module, const nn::Module::NamedTensors& managed) const {
  std::vector<std::string> lines;
  for (auto& [name, p] : managed)
    lines.push_back(concat("parameter ", name, " ", p.sizes(), " ", p.dtype(),
                           p.requires_grad() ? "" : " frozen"));
  for (auto& [name, t] : module.named_buffers())
    lines.push_back(concat("buffer ", name, " ", t.sizes(), " ", t.dtype()));
  lines.push_back(concat("bucket_cap_mb ", options_.bucket_cap_mb, ", first_bucket_bytes ",
                         options_.first_bucket_bytes, ", broadcast_buffers ",
                         options_.broadcast_buffers, ", find_unused_parameters ",
                         options_.find_unused_parameters, ", static_graph ",
                         options_.static_graph));
  verify_equal_on_all_ranks("ddp", group_, lines);
}

std::vector<Tensor> DdpReducer::buffers() const {
  std::vector<Tensor> result;
  for (nn::Slot* s : buffers_) result.push_back(s->tensor);
  return result;
}

Device DdpReducer::device() const { return parameters_[0].second.device(); }

std::string DdpReducer::name_of_parameter(int i) const {
  return concat(parameters_[size_t(i)].first, " (index ", i, ")");
}

std::vector<std::vector<std::string>> DdpReducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (auto& b : buckets_) {
    names.emplace_back();
    for (auto& e : b->entries()) names.back().push_back(e.name);
  }
  return names;
}

// ---- buckets
void DdpReducer::build(const std::vector<int>& order) {
  buckets_.clear();
  std::vector<int64_t> bytes;
  std::vector<DType> dtypes;
  for (int i : order) {
    const Tensor& p = parameters_[size_t(i)].second;
    bytes.push_back(p.nbytes()), dtypes.push_back(p.dtype());
  }
  const int64_t limit = std::max<int64_t>(1, std::llround(options_.bucket_cap_mb * (1 << 20)));
  for (auto& places : assign_buckets(bytes, dtypes, options_.first_bucket_bytes, limit)) {
    std::vector<GradBucket::Entry> entries;
    std::vector<int> members;
    int64_t offset = 0;
    for (int place : places) {
      const int i = order[size_t(place)];
      auto& [name, p] = parameters_[size_t(i)];
      members.push_back(i);
      entries.push_back({Ref<autograd::AutogradMeta>(&autograd::make_meta(p)),
                         name,
                         p.sizes(),
                         offset,
                         {0, p.numel(), offset}});
      offset += (p.numel() + 15) / 16 * 16;  // each starts 64-byte aligned in float32
    }
    GradBucket::Options o;
    const int64_t w = group_->size();
    o.padded = (offset + w - 1) / w * w;
    o.reduce_dtype = o.grad_dtype = dtypes[size_t(places[0])];
    o.replicate = w > 1 ? group_ : nullptr;
    o.divisor = divisor_;
    o.gradients_are_views = options_.gradient_as_bucket_view;
    auto bucket = std::make_shared<OrderedBucket>(*this, std::move(entries), o);
    const size_t k = buckets_.size();
    bucket->on_complete = [this, k] {
      complete_[k] = true;
      ready();
    };
    for (auto& e : bucket->entries()) e.meta->sink = bucket;
    if (hook_) exchange_with(*bucket, int(k), members);
    buckets_.push_back(std::move(bucket));
  }
}

// [Note: buckets are made twice] First in the reverse order of declaration, which is a guess; and
// after the first step that exchanged, in the order in which rank 0's gradients were complete, so
// that a bucket is full as early as can be. Which parameters share a bucket changes no bit.
void DdpReducer::rebuild() {
  rebuild_due_ = false;
  std::vector<bool> known(parameters_.size());
  std::vector<int32_t> order;
  auto add = [&](int i) {
    if (!known[size_t(i)]) order.push_back(i);
    known[size_t(i)] = true;
  };
  for (int i : ready_) add(i);
  // What rank 0 did not use (or, in a Join, everything) stays in the old order behind it.
  for (auto& b : buckets_)
    for (auto& e : b->entries()) add(index_.at(e.meta.get()));
  const Tensor shared = tensor<int32_t>(order);
  group_->broadcast(shared, 0, {.label = "ddp bucket order"}).wait();
  const int32_t* now = shared.data<int32_t>();
  ready_.clear();
  build({now, now + shared.numel()});
  rebuilt_ = true;
}

void DdpReducer::set_divisor(double divisor) {
  divisor_ = divisor;
  for (auto& b : buckets_) b->set_divisor(divisor);
}

void DdpReducer::register_comm_hook(CommHook hook) {
  require_idle("register_comm_hook");
  if (!hook) fail("[register_comm_hook] the hook is empty");
  if (hook_) fail("[register_comm_hook] there is a hook already: a model has one, for good");
  hook_ = std::move(hook);
  for (size_t k = 0; k < buckets_.size(); ++k) {
    std::vector<int> members;
    for (auto& e : buckets_[k]->entries()) members.push_back(index_.at(e.meta.get()));
    exchange_with(*buckets_[k], int(k), members);
  }
}

void DdpReducer::exchange_with(GradBucket& bucket, int index, const std::vector<int>& members) {
  bucket.set_exchange([this, &bucket, index, members](const Tensor& flat, const Tensor& output) {
    CommBucket b;
    b.index = index, b.is_last = index + 1 == num_buckets();
    b.buffer = flat, b.output = output;
    if (group_->size() > 1) b.replicate_group = group_;
    b.process_group = group_;
    for (auto& e : bucket.entries())
      b.gradients.push_back(over_storage(flat.storage(), e.shape, flat.dtype(), e.offset));
    for (int i : members) b.parameters.push_back(parameters_[size_t(i)].second);
    return hook_(b);
  });
}

// ---- forward
bool DdpReducer::broadcasts_buffers() const {
  return options_.broadcast_buffers && buffers_due_ && module_->training && !buffers_.empty() &&
         group_->size() > 1;
}

void DdpReducer::begin_forward() {
  if (!grad_enabled()) return;
  for (auto& [name, p] : frozen_)
    if (p.requires_grad() && !autograd::make_meta(p).sink)
      fail("[ddp] parameter ", name,
           " was frozen when its model was wrapped, and requires a gradient now, which nobody "
           "would average over the ranks: wrap the model anew");
  const bool broadcasts = broadcasts_buffers();
  int source = 0;
  if (join()) {
    announced_ = sync_;
    const JoinIteration now = join()->begin(
        *this, (sync_ ? JoinIteration::kExchanges : 0) | (broadcasts ? kBroadcastsBuffers : 0));
    source = now.authority();
    if (!join()->options().divide_by_initial_world_size) set_divisor(now.active());
  }
  if (broadcasts) broadcast_coalesced(group_, buffers(), source, "ddp buffers");
  buffers_due_ = sync_;
}

// ---- backward
void DdpReducer::check_usage(const std::vector<bool>& used) {
  if (options_.static_graph) {
    if (graph_.empty()) graph_ = used;
    for (size_t i = 0; i < used.size(); ++i)
      if (used[i] != graph_[i])
        fail("[ddp] rank ", group_->rank(), ": the graph changed, parameter ",
             name_of_parameter(int(i)), used[i] ? " is used now and was not" : " was used",
             " in the first step", used[i] ? "" : " and is not now",
             ". static_graph promises the same graph in every step: leave it off");
    return;
  }
  if (options_.find_unused_parameters) return;
  std::string unused;
  for (size_t i = 0; i < used.size(); ++i)
    if (!used[i] && parameters_[i].second.requires_grad())
      unused += concat(unused.empty() ? " " : ", ", name_of_parameter(int(i)));
  if (!unused.empty())
    fail("[ddp] rank ", group_->rank(),
         ": the reduction of this step could not finish, since the loss does not depend on these "
         "parameters:",
         unused,
         ". The other ranks would wait for their gradients. Use them in forward, freeze them, or "
         "set find_unused_parameters");
}

bool DdpReducer::on_plan(const autograd::Plan& plan) {
  if (!plan.accumulates) return false;
  std::map<autograd::GradSink*, std::vector<autograd::AutogradMeta*>> expected;
  std::vector<bool> used(parameters_.size());
  bool mine = false;
  for (auto& [leaf, n] : plan.leaves)
    if (const auto it = index_.find(leaf); it != index_.end()) {
      expected[leaf->sink.get()].push_back(leaf);
      used[size_t(it->second)] = mine = true;
    }
  if (!mine) return false;
  if (plan.create_graph)
    fail("[ddp] create_graph is not supported: take second derivatives of the unwrapped model");
  if (active_) fail("[ddp] a backward began inside another one");
  if (join() && sync_ != announced_)
    fail(
        "[ddp] inside a Join, no_sync must hold for forward and backward alike: ranks that ran "
        "out of inputs were told in forward that gradients ",
        announced_ ? "are" : "are not", " exchanged");
  if (sync_) check_usage(used);
  // Once: gradients in the first buckets are cleared by now, as a rule, and the new buckets are of
  // other sizes. Segments that lie idle go back before these ask for more.
  if (std::exchange(rebuilt_, false)) Context::current().cpu_allocator()->release_cached();
  active_ = true;
  syncs_now_ = sync_;
  next_ = 0;
  ready_.clear();
  complete_.assign(buckets_.size(), false);
  for (size_t k = 0; k < buckets_.size(); ++k) {
    buckets_[k]->expect(expected[buckets_[k].get()]);
    // Nothing to come: exchanged as it is, in its turn.
    if (buckets_[k]->expected() == 0) complete_[k] = true;
  }
  return true;
}

void DdpReducer::reduce(size_t k) {
  GradBucket::reduce({buckets_[k].get()}, concat("ddp bucket ", k));
}

// Buckets are exchanged in one order on all ranks, whatever the order in which they complete.
void DdpReducer::ready() {
  if (!syncs_now_) return;
  while (next_ < buckets_.size() && complete_[next_]) reduce(next_++);
}

// Waits for all buckets. keep: gradients are the averages; otherwise they stay as they were.
void DdpReducer::finish(bool keep) {
  try {
    ready();  // those that are left
  } catch (...) {
    for (auto& b : buckets_) b->abort();
    throw;
  }
  // Of one bucket, or a hook: the others' gradients are there all the same, and other ranks rebuild.
  FirstError errors;
  for (auto& b : buckets_) errors.run([&] { b->retire(keep); });
  if (rebuild_due_) errors.run([&] { rebuild(); });
  errors.rethrow();
}

void DdpReducer::on_end(bool failed) {
  if (!active_) return;
  active_ = false;
  if (failed) {
    for (auto& b : buckets_) b->abort();
    return;
  }
  if (!syncs_now_) {
    for (auto& b : buckets_) b->keep_pending();
    return;
  }
  finish(true);
}

// ---- Join
class DdpReducer::Hook : public JoinHook {
 public:
  Hook(DdpReducer& reducer, Join& join) : reducer_(reducer), join_(join) {}
  ~Hook() override { reducer_.set_divisor(reducer_.group_->size()); }

  void main_hook() override { reducer_.shadow(join_); }
  void post_hook(bool) override {
    // The ranks that ran out early did not step, unless a JoinableStep did it for them.
    std::vector<Tensor> all = reducer_.buffers();
    if (!join_.has_step())
      for (auto& [name, p] : reducer_.parameters_) all.push_back(p);
    broadcast_coalesced(reducer_.group_, all, join_.iteration().authority(), "ddp final model");
  }

 private:
  DdpReducer& reducer_;
  Join& join_;
};

std::unique_ptr<JoinHook> DdpReducer::join_hook(Join& join) {
  require_idle("Join");
  return std::make_unique<Hook>(*this, join);
}

void DdpReducer::shadow(Join& join) {
  const JoinIteration now = join.shadow(*this);
  if (now.note() & kBroadcastsBuffers)
    broadcast_coalesced(group_, buffers(), now.authority(), "ddp buffers");
  buffers_due_ = now.exchanges();
  if (!now.exchanges()) return;
  if (!join.options().divide_by_initial_world_size) set_divisor(now.active());
  for (auto& b : buckets_) b->take_up_changes();
  syncs_now_ = true, next_ = 0;
  complete_.assign(buckets_.size(), true);
  finish(join.has_step());
}

}  // namespace sherd::dist
