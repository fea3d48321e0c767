#include "distributed/distributed.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <tuple>

#include "core/context.h"
#include "core/philox.h"
#include "distributed/deadline.h"
#include "distributed/gloo/gloo_mesh.h"
#include "distributed/hex.h"
#include "distributed/hosts_exchange.h"
#include "distributed/mesh_process_group.h"
#include "distributed/mpi/mpi_job.h"
#include "distributed/outputs.h"
#include "distributed/shm/shm_mesh.h"
#include "distributed/tcp_store.h"

namespace sherd::dist {
namespace {

// What a rank knows of its job. Hangs on the Context.
struct Job {
  ~Job() { groups.clear(); }

  Group world;
  std::vector<Group> groups;  // made by new_group, this rank outside or in
  std::shared_ptr<Store> store;
  std::shared_ptr<TcpStore> own_store;
  std::string backend, address;
  std::shared_ptr<Node> node;   // of auto and shm
  std::shared_ptr<MpiJob> mpi;  // of mpi
  Milliseconds timeout{};
  int local_rank = 0, local_world_size = 1, groups_made = 0;
  std::map<std::string, int> local_groups_made;           // by their list of ranks
  std::map<std::string, int> splits_made, barriers_made;  // by group; the latter: monitored ones
};

Job& job() { return Context::current().state<Job>(); }

Job& need_job(const char* what) {
  Job& j = job();
  if (!j.world) fail("[", what, "] there is no process group: call init_process_group() first");
  return j;
}

// The backend that the caller, or the user by SHERD_BACKEND, asks for.
std::string chosen_backend(const InitOptions& options) {
  std::string name = options.backend;
  const char* variable = std::getenv("SHERD_BACKEND");
  if (name == "auto" && variable && *variable) name = variable;
  if (name != "auto" && name != "gloo" && name != "shm" && name != "mpi")
    fail("[init_process_group] there is no backend '", name,
         "': this build has auto, gloo, shm, mpi",
         name == options.backend ? "" : " (SHERD_BACKEND)");
  return name;
}

// All ranks find the same, members or not.
std::string backend_for(const Job& job, const std::vector<int>& ranks) {
  if (job.backend != "auto") return job.backend;
  if (ranks.size() <= 1 || job.node->share_memory(ranks)) return "shm";
  return job.node->ranks_per_host(ranks) > 0 ? "shm+gloo" : "gloo";
}

Group make_group(const Job& job, std::string name, int rank, std::vector<int> ranks,
                 Milliseconds timeout) {
  const int size = int(ranks.size());
  const auto store = std::make_shared<PrefixStore>(name, job.store);
  MeshProcessGroup::Init init{
      backend_for(job, ranks), std::move(name), rank, ranks, nullptr, nullptr, store, timeout};
  if (rank >= 0 && size > 1 && init.backend == "shm") {
    ShmTransport shm = connect_shm(job.node, rank, std::move(ranks), *store, timeout);
    init.mesh = std::move(shm.mesh);
    init.exchange = std::move(shm.exchange);
  } else if (rank >= 0 && size > 1 && init.backend == "mpi") {
    init.mesh = connect_mpi_mesh(job.mpi, rank, std::move(ranks), *store, timeout);
  } else if (rank >= 0 && size > 1) {
    init.mesh = connect_gloo_mesh(rank, ranks, *store, job.address, timeout);
  }
  if (rank >= 0 && init.backend == "shm+gloo") {
    const int width = job.node->ranks_per_host(ranks), first = rank / width * width;
    PrefixStore host_store(concat("host", rank / width), store);
    ShmTransport shm =
        connect_shm(job.node, rank - first, {ranks.begin() + first, ranks.begin() + first + width},
                    host_store, timeout);
    HostsTransport hosts = connect_hosts(
        std::move(init.mesh), {std::move(shm.mesh), std::move(shm.exchange)}, rank, size, width);
    init.mesh = std::move(hosts.mesh);
    init.exchange = std::move(hosts.exchange);
  }
  return std::make_shared<MeshProcessGroup>(std::move(init));
}

}  // namespace

void init_process_group(const InitOptions& options) {
  Job& j = job();
  if (j.world) fail("[init_process_group] was called before: destroy_process_group() first");
  check_timeout("init_process_group", options.timeout);
  Job made;
  made.backend = chosen_backend(options);
  const Rendezvous r = meet(options);
  made.address = r.address;
  made.store = r.store;
  made.own_store = r.own_store;
  made.timeout = options.timeout;
  made.local_rank = r.local_rank, made.local_world_size = r.local_world_size;
  const std::string theirs = r.store->compare_set("backend", "", made.backend);
  if (theirs != made.backend)
    fail("[init_process_group] rank ", r.rank, " asks for backend '", made.backend,
         "', and another rank for '", theirs, "'");
  if (made.backend == "mpi" && r.world_size > 1)
    made.mpi = MpiJob::meet(*r.store, r.rank, r.world_size, options.timeout);
  if ((made.backend == "auto" || made.backend == "shm") && r.world_size > 1) {
    made.node = Node::meet(*r.store, r.rank, r.world_size, options.timeout);
    if (made.backend == "shm" && int(made.node->ranks().size()) < r.world_size)
      fail("[init_process_group] backend 'shm' needs all ranks on one host, and rank ", r.rank,
           " shares memory with ", made.node->ranks().size(), " of ", r.world_size, " ranks",
           made.node->why_not().empty() ? "" : concat(" (", made.node->why_not(), ")"),
           ": use auto or gloo");
  }
  std::vector<int> ranks(r.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  made.world = make_group(made, "default", r.rank, ranks, options.timeout);
  j = std::move(made);
}

void destroy_process_group(const Group& group) {
  Job& j = need_job("destroy_process_group");
  if (group && group != j.world) {
    group->leave();
    std::erase(j.groups, group);
    return;
  }
  for (const Group& g : j.groups) g->leave();
  j.world->leave();
  if (j.own_store) j.own_store->leave(std::chrono::seconds(5));
  j = Job();
}

bool is_initialized() { return bool(job().world); }
const Group& default_group() { return need_job("default_group").world; }
int rank() { return need_job("rank").world->rank(); }
int world_size() { return need_job("world_size").world->size(); }
int local_rank() { return need_job("local_rank").local_rank; }
int local_world_size() { return need_job("local_world_size").local_world_size; }
Device local_device() { return kCPU; }
const std::shared_ptr<Store>& default_store() { return need_job("default_store").store; }

Group new_group(std::vector<int> ranks, std::optional<Milliseconds> timeout,
                bool use_local_synchronization) {
  Job& j = need_job("new_group");
  if (timeout) check_timeout("new_group", *timeout);
  if (ranks.empty()) fail("[new_group] got no ranks, should be one at least");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= j.world->size())
      fail("[new_group] rank ", ranks[i], " is none of the job's, 0 to ", j.world->size() - 1);
    if (std::count(ranks.begin(), ranks.end(), ranks[i]) > 1)
      fail("[new_group] rank ", ranks[i], " was given twice");
  }
  const auto place = std::find(ranks.begin(), ranks.end(), j.world->rank());
  const int rank = place == ranks.end() ? -1 : int(place - ranks.begin());
  std::string name;
  if (use_local_synchronization) {
    std::string list;
    for (int r : ranks) list += concat(r, ",");
    // Short, for it is in names of files.
    name = concat("local", ranks[0], "_", ranks.size(), "_",
                  hex_of(philox_key(0, list.data(), int64_t(list.size()))), "_",
                  ++j.local_groups_made[list]);
  } else {
    name = concat("group", ++j.groups_made);
  }
  const Group g =
      make_group(j, std::move(name), rank, std::move(ranks), timeout.value_or(j.timeout));
  j.groups.push_back(g);
  return g;
}

namespace {

// This rank's group of those that all ranks of `whole` make out of it by the same lists.
Group make_split(const Group& whole, const std::vector<std::vector<int>>& split_ranks,
                 std::optional<Milliseconds> timeout) {
  Job& j = need_job("split_group");
  std::string name = concat(whole->name(), "_split", ++j.splits_made[whole->name()], "_");
  int rank = -1;
  std::vector<int> members;  // of the job
  for (size_t i = 0; i < split_ranks.size(); ++i) {
    const auto& ranks = split_ranks[i];
    const auto place = std::find(ranks.begin(), ranks.end(), whole->rank());
    if (place == ranks.end()) continue;
    name += std::to_string(i);
    rank = int(place - ranks.begin());
    for (int r : ranks) members.push_back(whole->ranks()[r]);
  }
  const Group g =
      make_group(j, std::move(name), rank, std::move(members), timeout.value_or(whole->timeout()));
  j.groups.push_back(g);
  return g;
}

Group group_to_split(const Group& parent) {
  const Group whole = parent ? parent : need_job("split_group").world;
  if (whole->rank() < 0) fail("[split_group] this rank is not in group '", whole->name(), "'");
  return whole;
}

// " {0, 1} {2, 3}". Error for lists that do not split the group.
std::string checked(const std::vector<std::vector<int>>& split_ranks, const Group& whole) {
  std::vector<int> times(whole->size());
  std::string lists;
  for (auto& ranks : split_ranks) {
    lists += " {";
    if (ranks.empty()) fail("[split_group] got a list of no ranks, should be one at least");
    for (int r : ranks) {
      if (r < 0 || r >= whole->size())
        fail("[split_group] rank ", r, " is none of group '", whole->name(),
             "', which has ranks 0 to ", whole->size() - 1);
      if (++times[r] > 1) fail("[split_group] rank ", r, " was given twice");
      lists += concat(lists.back() == '{' ? "" : ", ", r);
    }
    lists += "}";
  }
  return lists;
}

}  // namespace

Group split_group(const Group& parent, const std::vector<std::vector<int>>& split_ranks,
                  std::optional<Milliseconds> timeout) {
  const Group whole = group_to_split(parent);
  std::string lists;
  try {
    if (timeout) check_timeout("split_group", *timeout);
    lists = checked(split_ranks, whole);
  } catch (const Error& e) {
    whole->refused(e.what());
    throw;
  }
  // Ranks that give other lists are told so, and wait for nobody.
  whole->barrier({.label = "split_group" + lists}).wait();
  return make_split(whole, split_ranks, timeout);
}

Group split_group(const Group& parent, int color, int key, std::optional<Milliseconds> timeout) {
  const Group whole = group_to_split(parent);
  if (timeout) check_timeout("split_group", *timeout);
  const Tensor all = empty({2 * whole->size()}, kInt64);
  all_gather_into_tensor(all, tensor<int64_t>({color, key}),
                         {.group = whole, .label = "split_group"});
  const int64_t* choice = all.data<int64_t>();
  std::map<int64_t, std::vector<std::pair<int64_t, int>>> by_color;  // (key, rank)
  for (int r = 0; r < whole->size(); ++r)
    if (choice[2 * r] >= 0) by_color[choice[2 * r]].emplace_back(choice[2 * r + 1], r);
  std::vector<std::vector<int>> split_ranks;
  for (auto& [c, members] : by_color) {
    std::sort(members.begin(), members.end());
    split_ranks.emplace_back();
    for (auto& [k, r] : members) split_ranks.back().push_back(r);
  }
  return make_split(whole, split_ranks, timeout);
}

namespace {

// The group that a call is for, its options, and whether it waits.
class Call {
 public:
  Call(const char* op, const CallOptions& o)
      : group_(o.group ? o.group : need_job(op).world), async_(o.async) {
    if (group_->rank() < 0) fail("[", op, "] this rank is not in group '", group_->name(), "'");
    options_.timeout = o.timeout;
    options_.label = o.label;
  }
  ProcessGroup* operator->() const { return group_.get(); }
  // Runs what may refuse an argument before the group sees it.
  template <class F>
  auto check(const F& arguments) const {
    try {
      return arguments();
    } catch (const Error& e) {
      group_->refused(e.what());
      throw;
    }
  }
  const CollectiveOptions& options() const { return options_; }
  Work finish(const Work& work) const {
    if (!async_) work.wait();
    return work;
  }

 private:
  Group group_;
  CollectiveOptions options_;
  bool async_;
};

// Views of `n` elements each of a contiguous tensor, one after another.
std::vector<Tensor> runs(const char* op, const char* what, const Tensor& x,
                         const std::vector<int64_t>& numels) {
  if (!x.is_contiguous()) fail("[", op, "] ", what, " should be contiguous");
  std::vector<Tensor> views;
  int64_t at = x.storage_offset();
  for (int64_t n : numels) {
    views.push_back(x.as_strided_raw({n}, {1}, at));
    at += n;
  }
  return views;
}

std::vector<int64_t> row_runs(const char* what, const Tensor& x, std::vector<int64_t> splits,
                              int size) {
  if (x.dim() == 0) fail("[all_to_all_single] ", what, " should have one dimension at least");
  const int64_t rows = x.size(0), width = rows ? x.numel() / rows : 0;
  if (splits.empty()) {
    if (rows % size)
      fail("[all_to_all_single] ", what, " of ", rows, " rows cannot be split evenly over ", size,
           " ranks: give splits");
    splits.assign(size, rows / size);
  }
  if (int(splits.size()) != size)
    fail("[all_to_all_single] got ", splits.size(), " splits of ", what, ", should be ", size);
  int64_t sum = 0;
  for (int64_t s : splits) {
    if (s < 0) fail("[all_to_all_single] a split of ", what, " is ", s, ", should be 0 or more");
    sum += s;
  }
  if (sum != rows)
    fail("[all_to_all_single] splits of ", what, " add up to ", sum, ", should be its ", rows,
         " rows");
  for (int64_t& s : splits) s *= width;
  return splits;
}

struct NamedList {
  const char* name;
  const std::vector<Tensor>& tensors;
};
void check_coalesced(const char* op, const NamedList& full, const NamedList& pieces, int size) {
  if (full.tensors.size() != pieces.tensors.size())
    fail("[", op, "] got ", full.tensors.size(), " ", full.name, " and ", pieces.tensors.size(),
         " ", pieces.name, ": should be as many");
  for (size_t i = 0; i < full.tensors.size(); ++i) {
    const Tensor &whole = full.tensors[i], &piece = pieces.tensors[i];
    if (whole.defined() && piece.defined() && whole.numel() != size * piece.numel())
      fail("[", op, "] ", full.name, "[", i, "] has shape ", whole.sizes(), " and ", pieces.name,
           "[", i, "] ", piece.sizes(), ": should be ", size, " times its elements");
  }
}

}  // namespace

Work broadcast(const Tensor& tensor, int root, const CallOptions& options) {
  Call call("broadcast", options);
  return call.finish(call->broadcast(tensor, root, call.options()));
}
Work all_reduce(const Tensor& tensor, ReduceOp op, const CallOptions& options) {
  Call call("all_reduce", options);
  return call.finish(call->all_reduce(tensor, op, call.options()));
}
Work reduce(const Tensor& tensor, int root, ReduceOp op, const CallOptions& options) {
  Call call("reduce", options);
  return call.finish(call->reduce(tensor, root, op, call.options()));
}
Work all_reduce_coalesced(const std::vector<Tensor>& tensors, ReduceOp op,
                          const CallOptions& options) {
  Call call("all_reduce_coalesced", options);
  call.check([&] {
    for (size_t i = 1; i < tensors.size(); ++i)
      if (tensors[0].defined() && tensors[i].defined() && tensors[i].dtype() != tensors[0].dtype())
        fail("[all_reduce_coalesced] tensors[", i, "] is ", tensors[i].dtype(), ", should be ",
             tensors[0].dtype(), " as the others");
  });
  return call.finish(call->all_reduce_coalesced(tensors, op, call.options()));
}
Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input,
                const CallOptions& options) {
  Call call("all_gather", options);
  return call.finish(call->all_gather(outputs, input, call.options()));
}
Work all_gather_into_tensor(const Tensor& output, const Tensor& input, const CallOptions& options) {
  Call call("all_gather_into_tensor", options);
  const auto views = call.check([&] {
    if (output.numel() != call->size() * input.numel())
      fail("[all_gather_into_tensor] output has shape ", output.sizes(), " and input ",
           input.sizes(), ": should be ", call->size(), " times its elements");
    return runs("all_gather_into_tensor", "output", output,
                std::vector<int64_t>(call->size(), input.numel()));
  });
  return call.finish(call->all_gather(views, input, call.options()));
}
Work all_gather_into_tensor_coalesced(const std::vector<Tensor>& outputs,
                                      const std::vector<Tensor>& inputs,
                                      const CallOptions& options) {
  Call call("all_gather_into_tensor_coalesced", options);
  call.check([&] {
    check_coalesced("all_gather_into_tensor_coalesced", {"outputs", outputs}, {"inputs", inputs},
                    call->size());
    check_outputs("all_gather_into_tensor_coalesced", "outputs", outputs);
  });
  std::vector<Tensor> pieces;
  for (const Tensor& x : inputs) pieces.push_back(x.defined() ? contiguous_raw(x) : x);
  const Work work = call->all_gather_pieces(outputs, pieces, call.options());
  for (const Tensor& x : outputs) x.bump_version();
  return call.finish(work);
}
Work gather(const std::vector<Tensor>& outputs, const Tensor& input, int root,
            const CallOptions& options) {
  Call call("gather", options);
  return call.finish(call->gather(outputs, input, root, call.options()));
}
Work scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root,
             const CallOptions& options) {
  Call call("scatter", options);
  return call.finish(call->scatter(output, inputs, root, call.options()));
}
Work reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs, ReduceOp op,
                    const CallOptions& options) {
  Call call("reduce_scatter", options);
  return call.finish(call->reduce_scatter(output, inputs, op, call.options()));
}
Work reduce_scatter_tensor(const Tensor& output, const Tensor& input, ReduceOp op,
                           const CallOptions& options) {
  Call call("reduce_scatter_tensor", options);
  const auto views = call.check([&] {
    if (input.numel() != call->size() * output.numel())
      fail("[reduce_scatter_tensor] input has shape ", input.sizes(), " and output ",
           output.sizes(), ": should be ", call->size(), " times its elements");
    return runs("reduce_scatter_tensor", "input", input,
                std::vector<int64_t>(call->size(), output.numel()));
  });
  return call.finish(call->reduce_scatter(output, views, op, call.options()));
}
Work reduce_scatter_tensor_coalesced(const std::vector<Tensor>& outputs,
                                     const std::vector<Tensor>& inputs, ReduceOp op,
                                     const CallOptions& options) {
  Call call("reduce_scatter_tensor_coalesced", options);
  call.check([&] {
    check_coalesced("reduce_scatter_tensor_coalesced", {"inputs", inputs}, {"outputs", outputs},
                    call->size());
    check_outputs("reduce_scatter_tensor_coalesced", "outputs", outputs);
  });
  const Work work = call->reduce_scatter_pieces(outputs, inputs, op, call.options());
  for (const Tensor& x : outputs) x.bump_version();
  return call.finish(work);
}
Work all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                const CallOptions& options) {
  Call call("all_to_all", options);
  return call.finish(call->all_to_all(outputs, inputs, call.options()));
}
Work all_to_all_single(const Tensor& output, const Tensor& input,
                       const std::vector<int64_t>& output_splits,
                       const std::vector<int64_t>& input_splits, const CallOptions& options) {
  Call call("all_to_all_single", options);
  const int size = call->size();
  const auto [to, from] = call.check([&] {
    return std::pair(
        runs("all_to_all_single", "output", output,
             row_runs("output", output, output_splits, size)),
        runs("all_to_all_single", "input", input, row_runs("input", input, input_splits, size)));
  });
  return call.finish(call->all_to_all(to, from, call.options()));
}
Work barrier(const CallOptions& options) {
  Call call("barrier", options);
  return call.finish(call->barrier(call.options()));
}

// Each rank says in the store that it is there; the group's rank 0 waits for all, and says how it
// went.
void monitored_barrier(const CallOptions& options) {
  Call call("monitored_barrier", options);
  Job& j = need_job("monitored_barrier");
  const Milliseconds timeout = options.timeout.value_or(call->timeout());
  check_timeout("monitored_barrier", timeout);
  const int n = j.barriers_made[call->name()]++;
  PrefixStore store(concat("monitored/", call->name(), "/", n), j.store);
  std::vector<std::string> keys;
  for (int r = 0; r < call->size(); ++r) keys.push_back(std::to_string(r));
  store.set(keys[call->rank()], "");
  std::string verdict = "all came";
  if (call->rank() == 0) {
    try {
      store.wait(keys, timeout);
    } catch (const StoreTimeout&) {
      std::string absent;
      int count = 0;
      for (int r = 0; r < call->size(); ++r)
        if (!store.check({keys[r]})) absent += concat(count++ ? ", " : "", call->ranks()[r]);
      verdict = concat("group '", call->name(), "': ", count == 1 ? "rank " : "ranks ", absent,
                       " did not come to monitored_barrier within ", timeout.count(), " ms");
    }
    store.set("verdict", verdict);
    if (n > 0 && verdict == "all came") {  // so all have read the one before
      PrefixStore last(concat("monitored/", call->name(), "/", n - 1), j.store);
      for (auto& key : keys) last.delete_key(key);
      last.delete_key("verdict");
    }
  } else {
    try {
      constexpr Milliseconds kMore(5000);
      store.wait({"verdict"}, std::min(timeout, Milliseconds::max() - kMore) + kMore);
      verdict = store.get("verdict");
    } catch (const StoreTimeout&) {
      verdict = concat("group '", call->name(), "': rank ", call->ranks()[0],
                       ", which speaks for all, did not come to monitored_barrier within ",
                       timeout.count(), " ms");
    }
  }
  if (verdict != "all came") fail("[monitored_barrier] ", verdict);
}

void send(const Tensor& tensor, int destination, int tag, const CallOptions& options) {
  isend(tensor, destination, tag, options).wait();
}
int recv(const Tensor& tensor, int source, int tag, const CallOptions& options) {
  const Work work = irecv(tensor, source, tag, options);
  work.wait();
  return work.source();
}
Work isend(const Tensor& tensor, int destination, int tag, const CallOptions& options) {
  Call call("send", options);
  return call->send(tensor, destination, tag, call.options());
}
Work irecv(const Tensor& tensor, int source, int tag, const CallOptions& options) {
  Call call("recv", options);
  return call->recv(tensor, source, tag, call.options());
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& ops) {
  if (ops.empty()) fail("[batch_isend_irecv] got no operations, should be one at least");
  const Group& world = need_job("batch_isend_irecv").world;
  const auto group_of = [&](const P2POp& o) { return o.group ? o.group : world; };
  for (size_t i = 0; i < ops.size(); ++i) {
    const P2POp& o = ops[i];
    const Group g = group_of(o);
    if (o.op != &isend && o.op != &irecv)
      fail("[batch_isend_irecv] operation ", i, " is neither isend nor irecv");
    if (g != group_of(ops[0]))
      fail("[batch_isend_irecv] operation ", i, " is of group '", g->name(),
           "', should be of group '", group_of(ops[0])->name(), "' as the others");
    if (!o.tensor.defined()) fail("[batch_isend_irecv] operation ", i, " has an undefined tensor");
    if (o.peer >= g->size() || o.peer < (o.op == &irecv ? -1 : 0) || o.peer == g->rank())
      fail("[batch_isend_irecv] operation ", i, ": rank ", o.peer, " is no other rank of group '",
           g->name(), "', which has ranks 0 to ", g->size() - 1);
  }
  std::vector<Work> works;
  for (const P2POp& o : ops) works.push_back(o.op(o.tensor, o.peer, o.tag, {.group = group_of(o)}));
  return works;
}

}  // namespace sherd::dist
