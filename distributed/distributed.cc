#include "distributed/distributed.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "core/context.h"
#include "distributed/gloo/gloo_mesh.h"
#include "distributed/mesh_process_group.h"
#include "distributed/mpi/mpi_job.h"
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
  std::map<std::string, int> local_groups_made;  // by their list of ranks
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
  return ranks.size() == 1 || job.node->share_memory(ranks) ? "shm" : "gloo";
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
    init.mesh = connect_gloo_mesh(rank, size, *store, job.address, timeout);
  }
  return std::make_shared<MeshProcessGroup>(std::move(init));
}

}  // namespace

void init_process_group(const InitOptions& options) {
  Job& j = job();
  if (j.world) fail("[init_process_group] was called before: destroy_process_group() first");
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
    for (int r : ranks) name += concat(name.empty() ? "group of " : ",", r);
    name += concat(" #", ++j.local_groups_made[name]);
  } else {
    name = concat("group", ++j.groups_made);
  }
  const Group g =
      make_group(j, std::move(name), rank, std::move(ranks), timeout.value_or(j.timeout));
  j.groups.push_back(g);
  return g;
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
Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input,
                const CallOptions& options) {
  Call call("all_gather", options);
  return call.finish(call->all_gather(outputs, input, call.options()));
}
Work all_gather_into_tensor(const Tensor& output, const Tensor& input, const CallOptions& options) {
  Call call("all_gather_into_tensor", options);
  if (output.numel() != call->size() * input.numel())
    fail("[all_gather_into_tensor] output has shape ", output.sizes(), " and input ", input.sizes(),
         ": should be ", call->size(), " times its elements");
  const auto views = runs("all_gather_into_tensor", "output", output,
                          std::vector<int64_t>(call->size(), input.numel()));
  return call.finish(call->all_gather(views, input, call.options()));
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
  if (input.numel() != call->size() * output.numel())
    fail("[reduce_scatter_tensor] input has shape ", input.sizes(), " and output ", output.sizes(),
         ": should be ", call->size(), " times its elements");
  const auto views = runs("reduce_scatter_tensor", "input", input,
                          std::vector<int64_t>(call->size(), output.numel()));
  return call.finish(call->reduce_scatter(output, views, op, call.options()));
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
  const auto to =
      runs("all_to_all_single", "output", output, row_runs("output", output, output_splits, size));
  const auto from =
      runs("all_to_all_single", "input", input, row_runs("input", input, input_splits, size));
  return call.finish(call->all_to_all(to, from, call.options()));
}
Work barrier(const CallOptions& options) {
  Call call("barrier", options);
  return call.finish(call->barrier(call.options()));
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

}  // namespace sherd::dist
