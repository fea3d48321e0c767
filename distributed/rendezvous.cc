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
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "distributed/deadline.h"
#include "distributed/file_store.h"
#include "distributed/job_environment.h"
#include "distributed/store_token.h"
#include "distributed/tcp_store.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

struct Place {  // where rank 0 serves the store
  std::string host;
  int port = 0;
};

// ---- tcp://host:port?rank=0&world_size=2 and file:///path?rank=0&world_size=2

// Takes rank and world size out of the address, into the options; both must be known then. Returns
// what lies between scheme and question mark.
std::string parse_query(const std::string& url, InitOptions& options) {
  std::string rest = url.substr(url.find("://") + 3), query;
  if (const auto at = rest.find('?'); at != std::string::npos) {
    query = rest.substr(at + 1);
    rest.resize(at);
  }
  std::istringstream fields(query);
  for (std::string f; std::getline(fields, f, '&');) {
    const auto equals = f.find('=');
    const std::string name = f.substr(0, equals);
    if (equals == std::string::npos || (name != "rank" && name != "world_size"))
      fail("[init_process_group] '", url, "': '", f, "' is neither rank=N nor world_size=N");
    int& field = name == "rank" ? options.rank : options.world_size;
    if (field >= 0)
      fail("[init_process_group] ", name, " is given twice: in '", url, "' and as an argument");
    field = to_number(name + " in '" + url + "'", f.substr(equals + 1));
  }
  return rest;
}

void need_rank_and_size(const std::string& url, const InitOptions& options) {
  for (const auto& [name, value] :
       {std::pair("rank", options.rank), std::pair("world_size", options.world_size)})
    if (value < 0)
      fail("[init_process_group] '", url, "' needs ", name, ": give .", name, " = N, or '?", name,
           "=N' in the address");
}

Place parse_tcp(const std::string& url, InitOptions& options) {
  std::string rest = url.substr(0, url.find('?')).substr(6);
  while (rest.ends_with('/')) rest.pop_back();
  const auto colon = rest.rfind(':');
  if (colon == std::string::npos || rest.ends_with(']') || colon + 1 == rest.size())
    fail("[init_process_group] '", url, "' has no port: tcp://host:port is needed");
  Place place{rest.substr(0, colon),
              to_number("the port of '" + url + "'", rest.substr(colon + 1))};
  if (place.host.starts_with('[') && place.host.ends_with(']'))
    place.host = place.host.substr(1, place.host.size() - 2);
  if (place.host.empty()) fail("[init_process_group] '", url, "' has no host");
  parse_query(url, options);
  need_rank_and_size(url, options);
  return place;
}

std::string parse_file(const std::string& url, InitOptions& options) {
  const std::string path = parse_query(url, options);
  if (path.empty()) fail("[init_process_group] '", url, "' has no path: file:///path is needed");
  need_rank_and_size(url, options);
  return path;
}

// ---- on one machine: a file says the port

// [Note: announced store] Where all ranks are on one machine and nobody gave a port that rank 0
// could take (under mpirun; under a torchrun whose agent sits on MASTER_PORT), rank 0 listens on
// any free port and writes port and token into a file, which only its user can read. The folder is
// one that the launcher made for this run, so the file can be of no other job. Each
// init_process_group has a number, and rank 0 removes its file when the store is destroyed.
class AnnouncedStore : public TcpStore {
 public:
  AnnouncedStore(const TcpStoreOptions& options, std::string file)
      : TcpStore(options), file_(std::move(file)) {
    const std::string beside = concat(file_, ".", getpid());
    const Socket out(open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    const std::string text = concat(port(), " ", options.token, "\n");
    if (!out || write(out.fd(), text.data(), text.size()) != ssize_t(text.size()) ||
        rename(beside.c_str(), file_.c_str()) != 0)
      fail("[init_process_group] cannot write ", file_, ": ", std::strerror(errno));
  }
  ~AnnouncedStore() override { unlink(file_.c_str()); }

 private:
  std::string file_;
};

std::shared_ptr<TcpStore> meet_by_file(int rank, Milliseconds timeout) {
  static std::atomic<int> calls = 0;
  const std::string file = concat(announcement_file(), "_", calls++);
  TcpStoreOptions options{.timeout = timeout, .token = token_from_environment()};
  if (rank == 0) {
    options.serve = true;
    if (options.token.empty()) options.token = make_token();
    return std::make_shared<AnnouncedStore>(options, file);
  }
  const auto deadline = deadline_after(timeout);
  for (;;) {
    if (std::ifstream in(file); in >> options.port) {
      in >> options.token;
      return std::make_shared<TcpStore>(options);
    }
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
  const int n = to_number("SHERD_STORE_FD", *fd);
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
  need(options.rank >= 0 || rank_from_environment(), "RANK");
  need(options.world_size >= 0 || world_size_from_environment(), "WORLD_SIZE");
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

// Where env:// says that rank 0 serves the store; none: [Note: announced store].
std::optional<Place> place_from_environment(const InitOptions& options) {
  switch (starter()) {
    case Starter::kMpirun:
      if (variable("MASTER_ADDR") || variable("MASTER_PORT")) break;
      if (!on_one_machine())
        fail(
            "[init_process_group] mpirun started ranks on several machines: set MASTER_ADDR (of "
            "rank 0's machine) and MASTER_PORT, as in mpirun -x MASTER_ADDR=node0 -x "
            "MASTER_PORT=29500, and SHERD_STORE_TOKEN");
      need_variables(options, false);
      return {};
    case Starter::kSlurm:
      need_variables(options, false);
      return Place{variable("MASTER_ADDR").value_or(slurm_first_host()),
                   number_from({"MASTER_PORT"}).value_or(slurm_port())};
    case Starter::kTorchrun:
      need_variables(options, true);
      if (const auto port = number_from({"SHERD_MASTER_PORT"}))
        return Place{*variable("MASTER_ADDR"), *port};
      if (!agent_owns_port()) break;
      if (on_one_machine() && !announcement_file().empty()) return {};
      return Place{*variable("MASTER_ADDR"), *number_from({"MASTER_PORT"}) + 1};
    case Starter::kOther:
      break;
  }
  need_variables(options, true);
  return Place{*variable("MASTER_ADDR"), *number_from({"MASTER_PORT"})};
}

void warn_of_open_store(const TcpStore& store) {
  std::fprintf(
      stderr,
      "[init_process_group] warning: SHERD_STORE_TOKEN is not set, so the store at %s takes "
      "whoever connects from this machine's own networks. Set it to the same secret on all "
      "nodes.\n",
      store.name().c_str());
}

}  // namespace

bool is_launched() { return rank_from_environment() && world_size_from_environment(); }

Rendezvous meet(const InitOptions& given) {
  InitOptions options = given;
  std::optional<Place> place;
  std::string file;
  const std::string& method = options.init_method;
  const bool alone = options.world_size == 1 && options.rank == 0;
  if (options.store || alone) {
    need_variables(options, false);
  } else if (method == "env://") {
    place = place_from_environment(options);
  } else if (method.starts_with("tcp://")) {
    place = parse_tcp(method, options);
  } else if (method.starts_with("file://")) {
    file = parse_file(method, options);
  } else {
    fail("[init_process_group] unknown init_method '", method,
         "': there are env://, tcp://host:port and file:///path, and .store");
  }
  if (place && (place->port < 0 || place->port > 65535))
    fail("[init_process_group] the port (MASTER_PORT) is ", place->port,
         ", should be 0 to 65535, as rank 0 listens there");

  Rendezvous r;
  r.rank = options.rank >= 0 ? options.rank : *rank_from_environment();
  r.world_size = options.world_size >= 0 ? options.world_size : *world_size_from_environment();
  check_world(r.rank, r.world_size);
  r.local_rank =
      options.local_rank >= 0 ? options.local_rank : local_rank_from_environment().value_or(r.rank);
  r.local_world_size = options.local_world_size >= 0
                           ? options.local_world_size
                           : local_world_size_from_environment().value_or(r.world_size);

  r.address = "127.0.0.1";
  std::shared_ptr<TcpStore>& own = r.own_store;
  if (options.store) {
    r.store = options.store;
    if (auto* tcp = dynamic_cast<TcpStore*>(r.store.get()))
      r.address = own_address(*tcp, "", false);
  } else if (alone) {
    r.store = std::make_shared<MemoryStore>();
  } else if (!file.empty()) {
    r.store = std::make_shared<FileStore>(file, options.timeout);
    if (r.local_world_size < r.world_size) r.address = interface_address("");
  } else if (!place) {
    r.store = own = meet_by_file(r.rank, options.timeout);
  } else {
    const bool several = r.local_world_size < r.world_size;
    const bool everywhere = several && !says_loopback(place->host);
    const std::string token = token_from_environment();
    r.store = own = std::make_shared<TcpStore>(
        TcpStoreOptions{.host = place->host,
                        .port = place->port,
                        .serve = r.rank == 0,
                        .listen_fd = r.rank == 0 ? inherited_listener(place->port) : -1,
                        .everywhere = everywhere,
                        .timeout = options.timeout,
                        .token = token});
    if (r.rank == 0 && everywhere && token.empty()) warn_of_open_store(*own);
    r.address = own_address(*own, place->host, several);
  }

  // In a store that somebody keeps, each init has keys of its own.
  const int64_t times = r.store->add(concat("rank/", r.rank), 1);
  if ((own || !file.empty()) && times > 1)
    fail("[init_process_group] rank ", r.rank, " came twice to the store ", r.store->name(),
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
