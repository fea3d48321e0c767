#include "distributed/rendezvous.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "distributed/tcp_store.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

std::optional<std::string> variable(const char* name) {
  const char* s = std::getenv(name);
  if (!s || !*s) return {};
  return s;
}

int number(const std::string& what, const std::string& text) {
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size())
    fail("[init_process_group] ", what, " is '", text, "', should be a whole number");
  return n;
}

// The first of the variables that is set.
std::optional<int> number_from(std::initializer_list<const char*> names) {
  for (const char* n : names)
    if (auto s = variable(n)) return number(n, *s);
  return {};
}

std::optional<int> env_rank() { return number_from({"RANK", "OMPI_COMM_WORLD_RANK"}); }
std::optional<int> env_world_size() { return number_from({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"}); }

struct Place {  // where rank 0 serves the store
  std::string host;
  int port = 0;
};

// ---- tcp://host:port?rank=0&world_size=2

Place parse_tcp(const std::string& url, InitOptions& options) {
  std::string rest = url.substr(6), query;
  if (const auto at = rest.find('?'); at != std::string::npos) {
    query = rest.substr(at + 1);
    rest.resize(at);
  }
  while (rest.ends_with('/')) rest.pop_back();
  const auto colon = rest.rfind(':');
  if (colon == std::string::npos || rest.ends_with(']') || colon + 1 == rest.size())
    fail("[init_process_group] '", url, "' has no port: tcp://host:port is needed");
  Place place{rest.substr(0, colon), number("the port of '" + url + "'", rest.substr(colon + 1))};
  if (place.host.starts_with('[') && place.host.ends_with(']'))
    place.host = place.host.substr(1, place.host.size() - 2);
  if (place.host.empty()) fail("[init_process_group] '", url, "' has no host");
  std::istringstream fields(query);
  for (std::string f; std::getline(fields, f, '&');) {
    const auto equals = f.find('=');
    const std::string name = f.substr(0, equals);
    if (equals == std::string::npos || (name != "rank" && name != "world_size"))
      fail("[init_process_group] '", url, "': '", f, "' is neither rank=N nor world_size=N");
    int& field = name == "rank" ? options.rank : options.world_size;
    if (field >= 0)
      fail("[init_process_group] ", name, " is given twice: in '", url, "' and as an argument");
    field = number(name + " in '" + url + "'", f.substr(equals + 1));
  }
  for (const auto& [name, value] :
       {std::pair("rank", options.rank), std::pair("world_size", options.world_size)})
    if (value < 0)
      fail("[init_process_group] '", url, "' needs ", name, ": give .", name, " = N, or '?", name,
           "=N' in the address");
  return place;
}

// ---- under mpirun, on one machine: a file in mpirun's folder of this job says the port

// [Note: mpirun] mpirun makes a folder for each job, which only its user may enter and which it
// removes at the end; so a file there can be nobody else's and of no other job. Where a version of
// mpirun names none, a folder of our own in /tmp stands in, and the file is named by the job's
// random key. Rank 0 listens on any free port and writes it down; the file of each
// init_process_group has a number, and rank 0 removes it when the store is destroyed.
std::string mpirun_file() {
  static std::atomic<int> calls = 0;
  std::string job = variable("PMIX_NAMESPACE").value_or("");
  std::string folder = variable("OMPI_MCA_orte_jobfam_session_dir").value_or("");
  if (folder.empty() || access(folder.c_str(), W_OK) != 0) {
    folder = concat("/tmp/sherd-", getuid());
    job = concat(job, "_", variable("OMPI_MCA_orte_precondition_transports").value_or(""));
    mkdir(folder.c_str(), 0700);
    struct stat s {};
    if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != getuid() ||
        (s.st_mode & 077) != 0)
      fail("[init_process_group] folder ", folder,
           " should be there, ours, and closed to others; or set MASTER_ADDR and MASTER_PORT");
  }
  std::replace(job.begin(), job.end(), '/', '_');
  return concat(folder, "/sherd_store_", job, "_", calls++);
}

// Rank 0's store, and its file.
class FileAnnouncedStore : public TcpStore {
 public:
  FileAnnouncedStore(const TcpStoreOptions& options, std::string file)
      : TcpStore(options), file_(std::move(file)) {
    const std::string beside = concat(file_, ".", getpid());
    std::ofstream(beside) << port() << std::flush;
    if (rename(beside.c_str(), file_.c_str()) != 0)
      fail("[init_process_group] cannot write ", file_, ": ", std::strerror(errno));
  }
  ~FileAnnouncedStore() override { unlink(file_.c_str()); }

 private:
  std::string file_;
};

std::shared_ptr<TcpStore> meet_under_mpirun(int rank, Milliseconds timeout) {
  const std::string file = mpirun_file();
  TcpStoreOptions options{.timeout = timeout};
  if (rank == 0) {
    options.serve = true;
    return std::make_shared<FileAnnouncedStore>(options, file);
  }
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    if (std::ifstream in(file); in >> options.port) return std::make_shared<TcpStore>(options);
    if (Clock::now() > deadline)
      fail("[init_process_group] rank ", rank, " waited ", timeout.count(),
           " ms for rank 0 to write ", file,
           ": is it running? Setting MASTER_ADDR and MASTER_PORT is another way");
    std::this_thread::sleep_for(Milliseconds(5));
  }
}

// ---- addresses

std::string interface_address(const std::string& name) {
  ifaddrs* list = nullptr;
  getifaddrs(&list);
  std::string found;
  for (ifaddrs* i = list; i && found.empty(); i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || i->ifa_addr->sa_family != AF_INET) continue;
    if (name.empty() ? bool(i->ifa_flags & IFF_LOOPBACK) : name != i->ifa_name) continue;
    SocketAddress a;
    std::memcpy(&a.storage, i->ifa_addr, sizeof(sockaddr_in));
    a.length = sizeof(sockaddr_in);
    found = a.host();
  }
  freeifaddrs(list);
  return found;
}

bool says_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// The address of ours at which the other ranks reach this one.
std::string own_address(const TcpStore& store, const std::string& host, bool several_machines) {
  if (const auto name = variable("GLOO_SOCKET_IFNAME")) {
    const std::string address = interface_address(*name);
    if (address.empty())
      fail("[init_process_group] GLOO_SOCKET_IFNAME is '", *name,
           "': this machine has no such network interface, or it has no IPv4 address");
    return address;
  }
  const SocketAddress& server = store.server_address();
  if (!server.is_loopback()) return local_address_towards(server).host();
  // Debian gives a machine's own name the address 127.0.1.1, which means nothing elsewhere.
  if (several_machines && !says_loopback(host)) {
    const std::string address = interface_address("");
    if (!address.empty()) return address;
  }
  return server.storage.ss_family == AF_INET ? "127.0.0.1" : "::1";
}

int inherited_listener(int port) {
  const auto fd = variable("SHERD_STORE_FD");
  if (!fd) return -1;
  // A job inside the job has the variable too, and another port.
  const int n = number("SHERD_STORE_FD", *fd);
  SocketAddress a;
  a.length = sizeof a.storage;
  if (getsockname(n, reinterpret_cast<sockaddr*>(&a.storage), &a.length) != 0 || a.port() != port)
    return -1;
  fcntl(n, F_SETFD, FD_CLOEXEC);
  return n;
}

void check_world(int rank, int world_size) {
  if (world_size < 1)
    fail("[init_process_group] the world size (WORLD_SIZE) is ", world_size,
         ", should be 1 at least");
  if (rank < 0 || rank >= world_size)
    fail("[init_process_group] the rank (RANK) is ", rank, ", should be 0 to ", world_size - 1,
         " for a world size (WORLD_SIZE) of ", world_size);
}

void need_variables(const InitOptions& options, bool address) {
  std::string missing;
  auto need = [&](bool there, const char* name) {
    if (!there) missing += concat(missing.empty() ? "" : ", ", name);
  };
  need(options.rank >= 0 || env_rank(), "RANK");
  need(options.world_size >= 0 || env_world_size(), "WORLD_SIZE");
  if (address) {
    need(bool(variable("MASTER_ADDR")), "MASTER_ADDR");
    need(bool(variable("MASTER_PORT")), "MASTER_PORT");
  }
  if (missing.empty()) return;
  fail("[init_process_group] ", options.store ? "a rank and a world size are" : "env:// is",
       " needed, and the environment lacks ", missing,
       ". Start the program with sherdrun or mpirun, set them, or give .rank = 0, .world_size = 1 "
       "to run alone");
}

}  // namespace

bool is_launched() {
  return (variable("RANK") && variable("WORLD_SIZE")) ||
         (variable("OMPI_COMM_WORLD_RANK") && variable("OMPI_COMM_WORLD_SIZE"));
}

Rendezvous meet(const InitOptions& given) {
  InitOptions options = given;
  Place place;
  bool by_mpirun = false;
  const std::string& method = options.init_method;
  const bool alone = options.world_size == 1 && options.rank == 0;
  if (options.store || alone) {
    need_variables(options, false);
  } else if (method == "env://") {
    by_mpirun =
        variable("OMPI_COMM_WORLD_SIZE") && !variable("MASTER_ADDR") && !variable("MASTER_PORT");
    if (by_mpirun && variable("OMPI_COMM_WORLD_LOCAL_SIZE") != variable("OMPI_COMM_WORLD_SIZE"))
      fail(
          "[init_process_group] mpirun started ranks on several machines: set MASTER_ADDR (of rank "
          "0's machine) and MASTER_PORT, as in mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500");
    need_variables(options, !by_mpirun);
    if (!by_mpirun)
      place = {*variable("MASTER_ADDR"), number("MASTER_PORT", *variable("MASTER_PORT"))};
  } else if (method.starts_with("tcp://")) {
    place = parse_tcp(method, options);
  } else {
    fail("[init_process_group] unknown init_method '", method,
         "': there are env:// and tcp://host:port, and .store");
  }
  if (!by_mpirun && !options.store && !alone && (place.port < 0 || place.port > 65535))
    fail("[init_process_group] the port (MASTER_PORT) is ", place.port,
         ", should be 0 to 65535, as rank 0 listens there");

  Rendezvous r;
  r.rank = options.rank >= 0 ? options.rank : *env_rank();
  r.world_size = options.world_size >= 0 ? options.world_size : *env_world_size();
  check_world(r.rank, r.world_size);
  auto local = [](int given, std::initializer_list<const char*> names, int otherwise) {
    return given >= 0 ? given : number_from(names).value_or(otherwise);
  };
  r.local_rank = local(options.local_rank, {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}, r.rank);
  r.local_world_size = local(options.local_world_size,
                             {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}, r.world_size);

  r.address = "127.0.0.1";
  std::shared_ptr<TcpStore>& own = r.own_store;
  if (options.store) {
    r.store = options.store;
    if (auto* tcp = dynamic_cast<TcpStore*>(r.store.get()))
      r.address = own_address(*tcp, "", false);
  } else if (alone) {
    r.store = std::make_shared<MemoryStore>();
  } else if (by_mpirun) {
    r.store = own = meet_under_mpirun(r.rank, options.timeout);
  } else {
    const bool several = r.local_world_size < r.world_size;
    r.store = own = std::make_shared<TcpStore>(
        TcpStoreOptions{.host = place.host,
                        .port = place.port,
                        .serve = r.rank == 0,
                        .listen_fd = r.rank == 0 ? inherited_listener(place.port) : -1,
                        .everywhere = several && !says_loopback(place.host),
                        .timeout = options.timeout});
    r.address = own_address(*own, place.host, several);
  }

  // In a store that somebody keeps, each init has keys of its own.
  const int64_t times = r.store->add(concat("rank/", r.rank), 1);
  if (own && times > 1)
    fail("[init_process_group] rank ", r.rank, " came twice to the store ", own->name(),
         ": two processes have the same RANK, or two jobs share the port");
  r.store = std::make_shared<PrefixStore>(concat("init", times), r.store);
  r.store->set_timeout(options.timeout);
  const std::string size = std::to_string(r.world_size);
  const std::string theirs = r.store->compare_set("world_size", "", size);
  if (theirs != size)
    fail("[init_process_group] rank ", r.rank, " has a world size (WORLD_SIZE) of ", size,
         ", and another rank has ", theirs);
  return r;
}

}  // namespace sherd::dist
