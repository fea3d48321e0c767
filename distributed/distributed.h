// The job as a rank sees it: init_process_group, the default group, and the collectives as free
// functions. Names and meanings are those of torch.distributed.
//
//     dist::init_process_group();                     // from what sherdrun, mpirun or srun set
//     Tensor x = full({4}, dist::rank() + 1);
//     dist::all_reduce(x);                            // SUM over all ranks, in place; waits
//     dist::Work w = dist::all_reduce(x, dist::ReduceOp::kAvg, {.async = true});
//     w.wait();
//     dist::Group pair = dist::new_group({0, 2});     // all ranks of the job make this call
//     if (pair->rank() >= 0) dist::broadcast(x, 0, {.group = pair});
//     dist::destroy_process_group();
//
// All of it belongs to the current Context: ranks may be threads of one process. Groups end with
// their Context.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "distributed/process_group.h"
#include "distributed/rendezvous.h"
#include "distributed/store.h"

namespace sherd::dist {

// Makes the default group. Error, naming what is wrong: a variable that is missing or no number, a
// rank that is not below the world size, an unknown backend or method, a port in use, ranks that
// did not come in time, a second call without destroy_process_group() between.
void init_process_group(const InitOptions& options = {});
// Ends the given group, or, without one, all groups in good order. All ranks make the same call.
void destroy_process_group(const Group& group = nullptr);

bool is_initialized();
const Group& default_group();  // Error before init_process_group() and after destroy
int rank();                    // in the job; Error before init, as for the next
int world_size();
int local_rank();  // on this machine
int local_world_size();
Device local_device();  // the one that this rank works on: the cpu
const std::shared_ptr<Store>& default_store();

// A group of some ranks of the job, in the given order. Every rank of the job makes the same calls
// of new_group in the same order; those outside get a group with rank() -1, on which every
// collective is an Error. With use_local_synchronization only the group's ranks make the call, and
// those of one list of ranks in the same order.
Group new_group(std::vector<int> ranks, std::optional<Milliseconds> timeout = {},
                bool use_local_synchronization = false);
// Cuts a group (null: the default one) into disjoint ones, of its ranks in the given order, and
// returns this rank's. A collective of that group alone: every rank of it gives the same lists. A
// rank that is in none gets a group with rank() -1.
Group split_group(const Group& parent, const std::vector<std::vector<int>>& split_ranks,
                  std::optional<Milliseconds> timeout = {});
// By colour, as MPI_Comm_split: those that give the same make a group, in order of their keys, then
// of their ranks. A negative colour is in none.
Group split_group(const Group& parent, int color, int key = 0,
                  std::optional<Milliseconds> timeout = {});

struct CallOptions {
  Group group = nullptr;  // the default group
  bool async = false;     // return at once; the Work says when it is done. Else wait here
  std::optional<Milliseconds> timeout = {};  // the group's
  std::string label = {};                    // part of the tag and of errors
};

// The collectives. See process_group.h for each; ranks are ranks in the group.
Work broadcast(const Tensor& tensor, int root, const CallOptions& options = {});
Work all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                const CallOptions& options = {});
Work reduce(
    const Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
    const CallOptions& options = {});  // tensors of ranks other than the root stay as they are
// Several tensors of one dtype as one collective; any shapes, the same on all ranks. Error for
// none.
Work all_reduce_coalesced(const std::vector<Tensor>& tensors, ReduceOp op = ReduceOp::kSum,
                          const CallOptions& options = {});
Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input,
                const CallOptions& options = {});
// output: size() times the input's elements, contiguous, rank after rank.
Work all_gather_into_tensor(const Tensor& output, const Tensor& input,
                            const CallOptions& options = {});
// outputs[i] of inputs[i], all in one collective.
Work all_gather_into_tensor_coalesced(const std::vector<Tensor>& outputs,
                                      const std::vector<Tensor>& inputs,
                                      const CallOptions& options = {});
Work gather(const std::vector<Tensor>& outputs, const Tensor& input, int root,
            const CallOptions& options = {});  // outputs: on the root alone
Work scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root,
             const CallOptions& options = {});  // inputs: on the root alone
Work reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs,
                    ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
// input: size() times the output's elements, contiguous, rank after rank.
Work reduce_scatter_tensor(const Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::kSum,
                           const CallOptions& options = {});
// outputs[i] of inputs[i], all in one collective. Contiguous.
Work reduce_scatter_tensor_coalesced(const std::vector<Tensor>& outputs,
                                     const std::vector<Tensor>& inputs,
                                     ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
Work all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                const CallOptions& options = {});
// Rows (dimension 0) of contiguous tensors, rank after rank. Splits: rows to and from each rank;
// empty: equal.
Work all_to_all_single(const Tensor& output, const Tensor& input,
                       const std::vector<int64_t>& output_splits = {},
                       const std::vector<int64_t>& input_splits = {},
                       const CallOptions& options = {});
Work barrier(const CallOptions& options = {});
// A barrier that goes through the store, waits, and says which ranks did not come in time: on all
// that did, and on those that come later. The group stays usable. To find out who hangs; slower
// than barrier().
void monitored_barrier(const CallOptions& options = {});
void send(const Tensor& tensor, int destination, int tag = 0, const CallOptions& options = {});
// Returns the rank that sent it. source -1: any.
int recv(const Tensor& tensor, int source = -1, int tag = 0, const CallOptions& options = {});
Work isend(const Tensor& tensor, int destination, int tag = 0, const CallOptions& options = {});
Work irecv(const Tensor& tensor, int source = -1, int tag = 0, const CallOptions& options = {});

// Sends and receives of one group, in any order: dist::batch_isend_irecv({{isend, x, 1}, {irecv, y,
// 1}}). One Work each. Error, before anything is issued, for none, for another function, two
// groups, or a peer that is no other rank.
struct P2POp {
  Work (*op)(const Tensor&, int peer, int tag, const CallOptions&);  // isend or irecv
  Tensor tensor;
  int peer;
  Group group = nullptr;
  int tag = 0;
};
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& ops);

}  // namespace sherd::dist
