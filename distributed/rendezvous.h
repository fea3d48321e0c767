// How the ranks of a job find each other: who this one is, how many there are, and the Store that
// they share.
#pragma once
#include <memory>
#include <string>

#include "distributed/store.h"

namespace sherd::dist {

class TcpStore;

struct InitOptions {
  // auto: shm for groups whose ranks are all on one host, gloo for others. Or one of these for all
  // groups, or mpi, for ranks that mpirun started. SHERD_BACKEND in the environment says what auto
  // stands for.
  std::string backend = "auto";
  // Where no store is given:
  //   env://           RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say all (sherdrun sets them);
  //                    mpirun's, Slurm's and torchrun's variables are known too, see
  //                    job_environment.h.
  //   tcp://host:port  rank 0 listens there. `rank` and `world_size` are given here, or in the
  //                    address: tcp://host:port?rank=0&world_size=2
  //   file:///path     a file in a folder that all ranks share; see file_store.h. Also with
  //                    ?rank=0&world_size=2
  // A world of one rank, given by number, needs neither a store nor an address.
  std::string init_method = "env://";
  int rank = -1, world_size = -1;
  Milliseconds timeout = kDefaultTimeout;  // for meeting, and the default of each collective
  std::shared_ptr<Store> store = nullptr;
  // This machine's ranks. -1: LOCAL_RANK and LOCAL_WORLD_SIZE, or mpirun's; else all are here.
  int local_rank = -1, local_world_size = -1;
};

struct Rendezvous {
  int rank, world_size, local_rank, local_world_size;
  std::shared_ptr<Store> store;
  std::shared_ptr<TcpStore> own_store;  // below it, where meet() made it
  std::string address;  // of this machine's interface towards the others, in numbers
};

// Error, which names what is wrong: variables that are missing or no number, a rank that is not
// below the world size or was taken twice, ranks that disagree on the world size, an unknown
// method, a port in use, a store that cannot be reached in time.
Rendezvous meet(const InitOptions& options);

// Did a launcher start this process: is there a rank and a world size in its environment?
bool is_launched();

}  // namespace sherd::dist
