// What the environment says of the job that this process is a rank of, whoever started it:
// sherdrun, PyTorch's torchrun, Open MPI's mpirun, Slurm's srun, or a shell script that sets RANK
// and its fellows.
//
//     std::optional<int> rank = rank_from_environment();    // none: nobody started this as a rank
//
//                      rank                   ranks, of this machine        where the store is
//     sherdrun, shell  RANK                   WORLD_SIZE, LOCAL_WORLD_SIZE  MASTER_ADDR, MASTER_PORT
//     torchrun         the same               the same                      see agent_owns_port()
//     mpirun           OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_(LOCAL_)SIZE  a file, or MASTER_*
//     srun             SLURM_PROCID           SLURM_STEP_NUM_TASKS, ...     the step's first host
//
// A variable that holds no number where one belongs is an Error which names it.
#pragma once
#include <initializer_list>
#include <optional>
#include <string>

namespace sherd::dist {

enum class Starter { kMpirun, kSlurm, kTorchrun, kOther };
Starter starter();

std::optional<int> rank_from_environment();
std::optional<int> world_size_from_environment();
std::optional<int> local_rank_from_environment();
std::optional<int> local_world_size_from_environment();
bool on_one_machine();  // as many ranks on this machine as in the job

// torchrun's agent may serve a store of its own on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True),
// which speaks PyTorch's protocol. On one machine rank 0 then takes a free port; on several it
// takes MASTER_PORT + 1, or SHERD_MASTER_PORT.
bool agent_owns_port();

// Where rank 0 may write down what is the store's: a path of this run of this job alone, in a
// folder that the launcher made for it. Empty: there is none. Under an mpirun that names no folder,
// one of ours in /tmp (Error if it belongs to somebody else).
std::string announcement_file();

// The first host of this step's list, 127.0.0.1 if it is on one machine; and a port that follows
// from the numbers of job and step: 15000 to 24999.
std::string slurm_first_host();
int slurm_port();
// "node[07-09,12]-ib,other" -> "node07-ib".
std::string first_of_host_list(const std::string& list);
// "2(x3),1" -> of node 2: 2, of node 3: 1; none if the text is not of that form or too short.
std::optional<int> tasks_of_node(const std::string& tasks_per_node, int node);

std::optional<std::string> variable(const char* name);  // none if it is empty
// The first of the variables that is set.
std::optional<int> number_from(std::initializer_list<const char*> names);
int to_number(const std::string& what, const std::string& text);

}  // namespace sherd::dist
