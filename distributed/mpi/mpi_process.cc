#include "distributed/mpi/mpi_process.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
// Open MPI does not free all that it takes, in its own threads too. Its plugins stay loaded, so that
// they can be told by their names; see also LeaksOfMpi.
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libmpi\nleak:libopen-\nleak:libpmix\nleak:libhwloc\nleak:mca_\n";
}
extern "C" int dlclose(void*) { return 0; }
#endif

namespace sherd::dist {
namespace {

// What it takes by way of libc's functions has no name of a caller.
struct LeaksOfMpi {
#ifdef __SANITIZE_ADDRESS__
  LeaksOfMpi() { __lsan_disable(); }
  ~LeaksOfMpi() { __lsan_enable(); }
#else
  LeaksOfMpi() {}
#endif
};

void check(const char* call, int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("[mpi] ", call, ": ", std::string(text, length));
}

// The largest tag that MpiMesh uses.
constexpr int kTags = 0x7fffffff;

}  // namespace

MpiProcess& MpiProcess::get() {
  static auto* process = new MpiProcess;  // exit's handlers come after destructors of statics
  return *process;
}

void MpiProcess::begin() {
  const LeaksOfMpi leaks;
  std::lock_guard lock(mutex_);
  if (ended_) fail("[mpi] MPI has ended in this process, and cannot begin again");
  if (begun_) return;
  int flag = 0, level = 0;
  MPI_Finalized(&flag);
  if (flag) fail("[mpi] the program has called MPI_Finalize, and MPI cannot begin again");
  MPI_Initialized(&flag);
  if (flag) {
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE)
      fail(
          "[mpi] the program has begun MPI itself, for fewer threads than Sherd needs beside it: "
          "use MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to init_process_group");
  } else {
    sigset_t pipe, before;  // for MPI's own threads: [Note: SIGPIPE]
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before);
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    check("MPI_Init_thread", code);
    if (level < MPI_THREAD_SERIALIZED)
      fail("[mpi] this MPI cannot be called from several threads (MPI_THREAD_SERIALIZED)");
    is_ours_ = true;
    pid_ = getpid();
    on_exit([](int code, void*) { get().end(code); }, nullptr);
  }
  check("MPI_Comm_dup", MPI_Comm_dup(MPI_COMM_WORLD, &communicator_));
  check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN));
  int* most = nullptr;
  MPI_Comm_get_attr(communicator_, MPI_TAG_UB, &most, &flag);
  if (!flag || *most < kTags) fail("[mpi] this MPI has tags up to ", flag ? *most : 0, " only");
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &size_);
  begun_ = true;
}

void MpiProcess::end(int exit_code) {
  {
    std::lock_guard lock(mutex_);
    if (!is_ours_ || getpid() != pid_) return;
    if (begun_ && given_up_ && exit_code == 0) {
      std::fprintf(stderr, "[mpi] MPI was given up after a failure: this rank cannot end well\n");
      std::fflush(nullptr);
      _exit(1);  // the others wait in MPI_Finalize; so mpirun, or the launcher, ends them
    }
    if (!usable()) return;
    if (exit_code == 0)
      for (Listener* l : listeners_) l->on_end();
    ended_ = true;
  }
  news_.notify_all();
  // Who failed does not wait for the others: mpirun, or the launcher, ends them.
  const LeaksOfMpi leaks;
  if (exit_code == 0) MPI_Finalize();
}

MPI_Request MpiProcess::send(const void* data, int64_t bytes, int peer, int tag) {
  MPI_Request request;
  check("MPI_Isend", MPI_Isend(data, int(bytes), MPI_BYTE, peer, tag, communicator_, &request));
  return request;
}

MPI_Request MpiProcess::recv(void* data, int64_t bytes, int peer, int tag) {
  MPI_Request request;
  check("MPI_Irecv", MPI_Irecv(data, int(bytes), MPI_BYTE, peer, tag, communicator_, &request));
  return request;
}

bool MpiProcess::test(MPI_Request& request, int* source) {
  int done = 0, cancelled = 0;
  MPI_Status status;
  status.MPI_SOURCE = -1;
  check("MPI_Test", MPI_Test(&request, &done, &status));
  if (!done) return false;
  MPI_Test_cancelled(&status, &cancelled);
  if (source) *source = cancelled ? -1 : status.MPI_SOURCE;
  return true;
}

void MpiProcess::cancel(MPI_Request& request) {
  if (request != MPI_REQUEST_NULL) check("MPI_Cancel", MPI_Cancel(&request));
}

void MpiProcess::let_go(MPI_Request& request) {
  if (request != MPI_REQUEST_NULL) check("MPI_Request_free", MPI_Request_free(&request));
}

}  // namespace sherd::dist
