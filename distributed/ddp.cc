#include "distributed/ddp.h"

#include <algorithm>
#include <map>

#include "autograd/grad_mode.h"
#include "distributed/distributed.h"
#include "distributed/verify_models.h"

namespace sherd::dist {

std::vector<std::vector<int>> assign_buckets(const std::vector<int64_t>& bytes,
                                             const std::vector<DType>& dtypes, int64_t first_limit,
                                             int64_t limit) {
  struct Open {
    std::vector<int> parameters;
    int64_t bytes = 0;
    bool first = true;
  };
  std::map<DType, Open> open;
  std::vector<std::vector<int>> buckets;
  auto close = [&](Open& o) {
    buckets.push_back(std::move(o.parameters));
    o = {{}, 0, false};
  };
  for (size_t i = 0; i < bytes.size(); ++i) {
    Open& o = open[dtypes[i]];
    o.parameters.push_back(int(i));
    o.bytes += bytes[i];
    if (o.bytes >= (o.first ? first_limit : limit)) close(o);
  }
  for (auto& [dtype, o] : open)
    if (!o.parameters.empty()) close(o);
  std::sort(buckets.begin(), buckets.end(), [](auto& a, auto& b) { return a[0] < b[0]; });
  return buckets;
}

DdpReducer::DdpReducer(nn::Module& module, const DdpOptions& options) : options_(options) {
  group_ = options.process_group ? options.process_group : default_group();
  if (group_->rank() < 0) fail("[ddp] this rank is not in the process group ", group_->name());
  module.materialize();
  verify_and_broadcast(module);
  nn::Module::NamedTensors trained;
  for (auto& [name, p] : module.named_parameters())
    if (p.requires_grad()) {
      if (autograd::make_meta(p).sink)
        fail("[ddp] parameter ", name, " is in another parallel wrapper already");
      trained.emplace_back(name, p);
    }
  if (trained.empty())
    fail("[ddp] ", module.type_name(), " has no parameter that requires a gradient");
  build(std::move(trained));
  autograd::add_observer(this);
}

DdpReducer::~DdpReducer() {
  autograd::remove_observer(this);
  for (auto& b : buckets_)
    for (auto& e : b->entries()) e.meta->sink = nullptr;
}

void DdpReducer::verify_and_broadcast(nn::Module& module) {
  if (group_->size() == 1) return;
  std::vector<std::string> lines;
  for (auto& [name, p] : module.named_parameters())
    lines.push_back(concat("parameter ", name, " ", p.sizes(), " ", p.dtype(),
                           p.requires_grad() ? "" : " frozen"));
  for (auto& [name, t] : module.named_buffers())
    lines.push_back(concat("buffer ", name, " ", t.sizes(), " ", t.dtype()));
  verify_equal_on_all_ranks("ddp", group_, lines);
  NoGrad off;
  for (auto& named : {module.named_parameters(), module.named_buffers()})
    for (auto& [name, t] : named)
      if (t.numel()) {
        group_->broadcast(t, 0, {.label = "ddp construction, " + name}).wait();
        t.bump_version();
      }
}

void DdpReducer::build(nn::Module::NamedTensors parameters) {
  std::reverse(parameters.begin(), parameters.end());
  std::vector<int64_t> bytes;
  std::vector<DType> dtypes;
  for (auto& [name, p] : parameters) bytes.push_back(p.nbytes()), dtypes.push_back(p.dtype());
  for (auto& indices :
       assign_buckets(bytes, dtypes, options_.first_bucket_bytes, options_.bucket_bytes)) {
    std::vector<GradBucket::Entry> entries;
    int64_t offset = 0;
    for (int i : indices) {
      auto& [name, p] = parameters[i];
      autograd::AutogradMeta& meta = autograd::make_meta(p);
      if (meta.name.empty()) meta.name = name;
      entries.push_back(
          {Ref<autograd::AutogradMeta>(&meta), name, p.sizes(), offset, {0, p.numel(), offset}});
      offset += (p.numel() + 15) / 16 * 16;  // each starts 64-byte aligned in float32
    }
    GradBucket::Options o;
    const int64_t w = group_->size();
    o.padded = (offset + w - 1) / w * w;
    o.reduce_dtype = o.grad_dtype = dtypes[indices[0]];
    o.replicate = w > 1 ? group_ : nullptr;
    o.divisor = double(w);
    auto bucket = std::make_shared<GradBucket>(std::move(entries), o);
    const size_t k = buckets_.size();
    bucket->on_complete = [this, k] {
      complete_[k] = true;
      ready();
    };
    for (auto& e : bucket->entries()) e.meta->sink = bucket;
    buckets_.push_back(std::move(bucket));
  }
}

bool DdpReducer::on_plan(const autograd::Plan& plan) {
  if (!plan.accumulates) return false;
  std::map<autograd::GradSink*, std::vector<autograd::AutogradMeta*>> expected;
  for (auto& [leaf, n] : plan.leaves)
    if (leaf->sink) expected[leaf->sink.get()].push_back(leaf);
  const bool mine = std::any_of(buckets_.begin(), buckets_.end(),
                                [&](auto& b) { return expected.count(b.get()); });
  if (!mine) return false;
  if (plan.create_graph)
    fail("[ddp] create_graph is not supported: take second derivatives of the unwrapped model");
  if (active_) fail("[ddp] a backward began inside another one");
  std::string unused;
  for (auto& b : buckets_) {
    const auto& leaves = expected[b.get()];
    for (auto& e : b->entries())
      if (std::none_of(leaves.begin(), leaves.end(), [&](auto* m) { return m == e.meta.get(); }))
        unused += " " + e.name;
  }
  if (!unused.empty() && sync_ && !options_.find_unused_parameters)
    fail("[ddp] rank ", group_->rank(), ": the loss does not depend on these parameters:", unused,
         ". The other ranks would wait for their gradients. Use them in forward, freeze them, or "
         "set "
         "find_unused_parameters");
  active_ = true;
  syncs_now_ = sync_;
  next_ = 0;
  complete_.assign(buckets_.size(), false);
  for (size_t k = 0; k < buckets_.size(); ++k) {
    buckets_[k]->expect(expected[buckets_[k].get()]);
    // Nothing to come: exchanged as it is, in its turn.
    if (buckets_[k]->expected() == 0) complete_[k] = true;
  }
  return true;
}

// Buckets are exchanged in one order on all ranks, whatever the order in which they complete.
void DdpReducer::ready() {
  if (!syncs_now_) return;
  while (next_ < buckets_.size() && complete_[next_]) {
    GradBucket::reduce({buckets_[next_].get()}, concat("ddp bucket ", next_));
    ++next_;
  }
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
  ready();
  for (auto& b : buckets_) b->retire();
}

}  // namespace sherd::dist
