// MpiProcess: MPI in this process, as far as Sherd uses it: messages that do not block. There is
// one, for MPI has one state a process; it does not say who a rank is (mpi_job.h does).
//
//     MpiProcess& mpi = MpiProcess::get();
//     auto lock = mpi.lock();                            // held in every call of MPI
//     MPI_Request request = mpi.send(data, bytes, process, tag);
//     if (mpi.test(request)) ...                         // done
//
// [Note: one lock] MPI is started with MPI_THREAD_SERIALIZED, and every call is made under one
// lock. No call blocks, so the lock is never held for longer than the copy of one message takes.
//
// [Note: given up] A receive that has met its message cannot be cancelled. If it does not end (the
// sender died or was stopped) and its group has failed, its memory may be freed, and any later call
// of MPI, on whatever group, could write into it. So then this process calls MPI no more: all its
// groups over MPI fail.
#pragma once
#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"

namespace sherd::dist {

class MpiProcess {
 public:
  // Told, under the lock, when this process ends in good order.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_end() = 0;
  };

  static MpiProcess& get();

  // MPI_Init_thread, unless it was called before. A collective of all processes that mpirun
  // started, which no deadline can end. Error if MPI gives too little. exit(0) will end MPI in good
  // order (MPI_Finalize waits for the other processes); a process that ends with another code does
  // not.
  void begin();
  void end(int exit_code);

  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  // Wakes threads that sleep between two looks; see MpiMesh.
  std::condition_variable& news() { return news_; }

  // ---- with the lock held
  bool usable() const { return begun_ && !ended_ && !given_up_; }
  void give_up() { given_up_ = true; }
  int rank() const { return rank_; }  // in MPI_COMM_WORLD
  int size() const { return size_; }
  void add(Listener* listener) { listeners_.insert(listener); }
  void remove(Listener* listener) { listeners_.erase(listener); }
  // A number for a group: all its members take the largest that one of them proposes, and no two of
  // them have had it before.
  int64_t proposed_number() const { return next_number_; }
  void take_number(int64_t number) { next_number_ = number + 1; }

  // Takes the tag for one send to that process at a time: false if one is under way.
  bool take_tag(int peer, int tag) { return tags_.emplace(peer, tag).second; }
  void give_back_tag(int peer, int tag) { tags_.erase({peer, tag}); }

  // `peer`: in MPI_COMM_WORLD, or MPI_ANY_SOURCE. At most INT_MAX bytes.
  MPI_Request send(const void* data, int64_t bytes, int peer, int tag);
  MPI_Request recv(void* data, int64_t bytes, int peer, int tag);
  // Is it done? Then the request is null, and `source` the peer; cancelled: -1.
  bool test(MPI_Request& request, int* source = nullptr);
  void cancel(MPI_Request& request);  // a receive, once; it is to be tested until it is done
  void let_go(MPI_Request& request);  // a send: nobody asks for it any more

 private:
  MpiProcess() = default;

  std::mutex mutex_;
  std::condition_variable news_;
  bool begun_ = false, ended_ = false, given_up_ = false;
  bool is_ours_ = false;  // begun here, so ended here
  int pid_ = 0, rank_ = 0, size_ = 0;
  MPI_Comm communicator_ = MPI_COMM_NULL;  // Sherd's own copy of MPI_COMM_WORLD
  int64_t next_number_ = 0;
  std::set<Listener*> listeners_;
  std::set<std::pair<int, int>> tags_;
};

}  // namespace sherd::dist
