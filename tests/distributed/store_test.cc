// The stores: one map, whatever it is reached through, and what may go wrong on the way.
#include "distributed/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>

#include "distributed/deadline.h"
#include "distributed/file_store.h"
#include "distributed/store_token.h"
#include "distributed/tcp_store.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

struct Kind {
  const char* name;
  std::function<std::shared_ptr<Store>()> make;
};
std::shared_ptr<Store> memory() { return std::make_shared<MemoryStore>(); }
std::shared_ptr<Store> tcp() { return std::make_shared<TcpStore>(TcpStoreOptions{.serve = true}); }

std::string new_path() {
  static int made = 0;
  return testing::TempDir() + concat("store_", getpid(), "_", made++);
}
std::shared_ptr<Store> file() { return std::make_shared<FileStore>(new_path()); }

class Stores : public testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<Store> store_ = GetParam().make();
};

TEST_P(Stores, S_001_SetGetAddDelete) {
  Store& s = *store_;
  for (int i : {1, 2, 3}) s.add("three", i);
  for (int i : {1, 2, 3, 4, 5, 6}) s.add("six", i);
  EXPECT_EQ(s.get("three"), "6");
  EXPECT_EQ(s.get("six"), "21");
  EXPECT_EQ(s.add("six", -22), -1);
  s.set("-dash", "value");
  const std::string bytes("a\0b\xff\n", 5);
  s.set(bytes, bytes + bytes);
  s.set("", "empty key");
  EXPECT_EQ(s.get("-dash"), "value");
  EXPECT_EQ(s.get(bytes), bytes + bytes);
  EXPECT_EQ(s.get(""), "empty key");
  EXPECT_EQ(s.num_keys(), 5);  // no keys of our own beside them
  EXPECT_TRUE(s.check({"three", "-dash"}));
  EXPECT_TRUE(s.check({}));
  EXPECT_FALSE(s.check({"three", "none"}));
  EXPECT_TRUE(s.delete_key("-dash"));
  EXPECT_FALSE(s.delete_key("-dash"));
  EXPECT_FALSE(s.check({"-dash"}));
  s.set("empty", "");
  EXPECT_EQ(s.get("empty"), "");
  const std::string large(5 << 20, 'x');
  s.set("large", large);
  EXPECT_EQ(s.get("large"), large);
  s.set("word", "abc");
  EXPECT_HAS(error_of([&] { s.add("word", 1); }), "holds 'abc'");
  EXPECT_EQ(s.get("word"), "abc");
}

TEST_P(Stores, S_002_CompareSet) {
  Store& s = *store_;
  EXPECT_EQ(s.compare_set("k", "old", "new"), "old");  // absent: nothing is set
  EXPECT_FALSE(s.check({"k"}));
  EXPECT_EQ(s.compare_set("k", "", "first"), "first");
  EXPECT_EQ(s.compare_set("k", "wrong", "second"), "first");
  EXPECT_EQ(s.compare_set("k", "first", "second"), "second");
  EXPECT_EQ(s.get("k"), "second");
}

TEST_P(Stores, S_003_WaitEndsInTimeAndNamesTheKeys) {
  Store& s = *store_;
  s.set("there", "1");
  auto start = Clock::now();
  s.wait({"there"}, milliseconds(5000));
  EXPECT_LT(Clock::now() - start, milliseconds(1000));
  start = Clock::now();
  const std::string e = error_of([&] { s.wait({"there", "never", "ever"}, milliseconds(250)); });
  EXPECT_GE(Clock::now() - start, milliseconds(245));
  EXPECT_LT(Clock::now() - start, milliseconds(3000));
  EXPECT_HAS(e, "waited 250 ms");
  EXPECT_HAS(e, "never'");
  EXPECT_HAS(e, "ever'");
  EXPECT_FALSE(has(e, "there'"));
  EXPECT_THROW(s.wait({"never"}, milliseconds(0)), StoreTimeout);
  s.set_timeout(milliseconds(100));
  EXPECT_HAS(error_of([&] { s.get("never"); }), "waited 100 ms");
}

TEST(Deadline, ALongTimeoutIsTheLastTimeThereIs) {
  const auto now = Clock::now();
  EXPECT_EQ(deadline_after(milliseconds(5), now), now + milliseconds(5));
  for (auto none : {milliseconds(0), milliseconds(-5), milliseconds::min()})
    EXPECT_EQ(deadline_after(none, now), now);
  EXPECT_EQ(deadline_after(milliseconds::max(), now), Clock::time_point::max());
  EXPECT_EQ(deadline_after(milliseconds(5), Clock::time_point::max()), Clock::time_point::max());
  EXPECT_EQ(deadline_after(std::chrono::hours(24 * 365), now), now + std::chrono::hours(24 * 365));
}

TEST_P(Stores, S_003_WaitsForEver) {
  store_->set_timeout(milliseconds::max());
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(100));
    store_->set("a", "1");
    std::this_thread::sleep_for(milliseconds(100));
    store_->set("b", "2");
  });
  EXPECT_EQ(error_of([&] { EXPECT_EQ(store_->get("a"), "1"); }), "no error");
  EXPECT_EQ(error_of([&] { store_->wait({"b"}, milliseconds::max()); }), "no error");
  setter.join();
}

TEST_P(Stores, S_003_WaitWakesWhenAnotherThreadSets) {
  Store& s = *store_;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    s.set("a", "1");
    s.add("b", 1);
    s.compare_set("c", "", "1");
  });
  s.wait({"c", "a", "b"}, milliseconds(10000));
  EXPECT_TRUE(s.check({"a", "b", "c"}));
  other.join();
}

TEST_P(Stores, ManyThreads) {
  Store& s = *store_;
  std::vector<std::thread> threads;
  std::atomic<int> won = 0;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) s.add("sum", 1);
      if (s.compare_set("first", "", std::to_string(t)) == std::to_string(t)) ++won;
      s.add("here", 1);
      while (s.get("here") != "8") std::this_thread::yield();
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(s.get("sum"), "800");
  EXPECT_EQ(won, 1);
}
INSTANTIATE_TEST_SUITE_P(
    All, Stores,
    testing::Values(Kind{"memory", memory}, Kind{"tcp", tcp}, Kind{"file", file},
                    Kind{"prefix_file", [] { return std::make_shared<PrefixStore>("p", file()); }},
                    Kind{"prefix_memory",
                         [] { return std::make_shared<PrefixStore>("p", memory()); }},
                    Kind{"prefix_tcp", [] { return std::make_shared<PrefixStore>("p", tcp()); }}),
    [](const auto& info) { return info.param.name; });

// ---- files

TEST(FileStore, S_006_goes_away_with_its_last_handle) {
  const std::string path = new_path();
  auto a = std::make_unique<FileStore>(path), b = std::make_unique<FileStore>(path);
  a->set("key", "value");
  EXPECT_EQ(b->get("key"), "value");
  EXPECT_EQ(b->add("n", 2), 2);
  EXPECT_EQ(a->add("n", 3), 5);
  a.reset();
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  FileStore c(path);
  EXPECT_EQ(c.get("n"), "5");
  b.reset();
  EXPECT_EQ(c.get("key"), "value");
  { FileStore d(path); }
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
}

TEST(FileStore, S_006_leftover_of_a_killed_job_is_not_taken) {
  const std::string path = new_path();
  const pid_t pid = fork();
  if (pid == 0) {
    FileStore store(path);
    store.set("rank/0", "old");
    raise(SIGKILL);
  }
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  {
    FileStore store(path);
    EXPECT_FALSE(store.check({"rank/0"}));
    EXPECT_EQ(store.num_keys(), 0);
    store.set("rank/0", "new");
    EXPECT_EQ(FileStore(path).get("rank/0"), "new");
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(FileStore, S_006_half_a_record_is_written_over) {
  const std::string path = new_path();
  FileStore a(path);
  a.set("k", "v");
  const Socket half(
      open(path.c_str(), O_WRONLY | O_APPEND));  // what a rank killed in a write leaves
  const int64_t sizes[2] = {5, 1000};
  ASSERT_EQ(write(half.fd(), sizes, sizeof sizes), ssize_t(sizeof sizes));
  ASSERT_EQ(write(half.fd(), "other", 5), 5);
  FileStore b(path);
  EXPECT_EQ(b.num_keys(), 1);
  b.set("more", "w");
  EXPECT_EQ(a.get("more"), "w");
  EXPECT_EQ(a.get("k"), "v");
}

// A process that holds the lock of a call and was stopped: the others do not wait for ever.
TEST(FileStore, S_006_a_stopped_holder_is_an_error) {
  const std::string path = new_path();
  FileStore store(path, std::chrono::milliseconds(200));
  store.set("k", "v");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const int fd = open(path.c_str(), O_RDWR);
    struct flock l {};
    l.l_type = F_WRLCK, l.l_whence = SEEK_SET, l.l_start = 1, l.l_len = 1;
    if (fcntl(fd, F_OFD_SETLKW, &l) != 0 || write(ends[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char got = 0;
  ASSERT_EQ(read(ends[0], &got, 1), 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(store.get("k"), StoreTimeout);
  EXPECT_THROW(store.set("k", "w"), StoreTimeout);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  close(ends[0]), close(ends[1]);
  EXPECT_EQ(store.get("k"), "v");
}

// Between the wait and the read, the key may go.
TEST(FileStore, S_006_get_of_a_key_that_comes_and_goes) {
  const std::string path = new_path();
  FileStore a(path), b(path);
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      b.set("k", "v");
      b.delete_key("k");
    }
    b.set("k", "v");
  });
  for (int i = 0; i < 200; ++i) EXPECT_EQ(a.get("k"), "v");
  stop = true;
  other.join();
  EXPECT_EQ(a.num_keys(), 1);
}

TEST(FileStore, AnotherFileIsLeftAlone) {
  const std::string path = new_path();
  const Socket file(open(path.c_str(), O_WRONLY | O_CREAT, 0600));
  ASSERT_EQ(write(file.fd(), "my thesis", 9), 9);
  EXPECT_HAS(error_of([&] { FileStore store(path); }), "holds something else than a store");
  struct stat s;
  stat(path.c_str(), &s);
  EXPECT_EQ(s.st_size, 9);
  EXPECT_HAS(error_of([] { FileStore store("/no/such/folder/store"); }), "/no/such/folder/store");
  unlink(path.c_str());
}

TEST(PrefixStore, S_007_KeepsKeysApart) {
  const auto below = memory();
  PrefixStore p("p", below), q("q", below);
  p.set("foo", "1");
  q.add("foo", 2);
  EXPECT_EQ(below->get("p/foo"), "1");
  EXPECT_EQ(below->get("q/foo"), "2");
  EXPECT_EQ(p.get("foo"), "1");
  EXPECT_EQ(p.compare_set("bar", "", "x"), "x");
  EXPECT_FALSE(q.check({"bar"}));
  EXPECT_TRUE(p.delete_key("foo"));
  EXPECT_TRUE(q.check({"foo"}));
}

TEST(TcpStore, S_005_ServesClients) {
  TcpStore server({.serve = true});
  std::vector<std::thread> threads;
  server.set("key", "value");
  for (int i = 0; i < 5; ++i)
    threads.emplace_back([&, i] {
      TcpStore client({.port = server.port()});
      EXPECT_EQ(client.get("key"), "value");
      const std::string mine = "key" + std::to_string(i);
      client.set(mine, "a");
      EXPECT_EQ(client.compare_set(mine, "a", "b"), "b");
    });
  for (auto& t : threads) t.join();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(server.get("key" + std::to_string(i)), "b");
}

TEST(TcpStore, ClientMayComeBeforeTheServer) {
  int port;
  {
    TcpStore probe({.serve = true});
    port = probe.port();
  }
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(100));
    TcpStore server({.port = port, .serve = true});
    server.wait({"done"}, milliseconds(10000));
  });
  TcpStore client({.port = port, .timeout = milliseconds(10000)});
  client.set("done", "");
  late.join();
}

TEST(TcpStore, S_004_T_28_PortInUseIsNamed) {
  TcpStore first({.serve = true});
  const std::string e = error_of([&] { TcpStore second({.port = first.port(), .serve = true}); });
  EXPECT_HAS(e, concat("127.0.0.1:", first.port()));
  EXPECT_HAS(e, "choose another --master_port");
}

TEST(TcpStore, ConnectsForEver) {
  TcpStore server({.serve = true, .timeout = milliseconds::max()});
  TcpStore client({.port = server.port(), .timeout = milliseconds::max()});
  server.set("a", "1");
  EXPECT_EQ(client.get("a"), "1");
}

TEST(TcpStore, NobodyThere) {
  const std::string e =
      error_of([] { TcpStore client({.port = 1, .timeout = milliseconds(200)}); });
  EXPECT_HAS(e, "tcp://127.0.0.1:1");
  EXPECT_HAS(e, "Connection refused");
  EXPECT_HAS(error_of([] { TcpStore client({.host = "no-such-host.invalid", .port = 1}); }),
             "no-such-host.invalid");
}

// Where loopback is down, nobody will ever answer there.
TEST(TcpStore, WithoutALoopbackThereIsNoUseInWaiting) {
  std::string text;
  Clock::duration taken{};
  // A namespace of the thread's own, in which all devices are down.
  std::thread([&] {
    if (::unshare(CLONE_NEWNET) != 0) return;
    const auto start = Clock::now();
    text = error_of([] { TcpStore({.port = 1, .timeout = std::chrono::seconds(60)}); });
    taken = Clock::now() - start;
  }).join();
  if (text.empty()) GTEST_SKIP() << "network namespaces are not permitted here";
  EXPECT_HAS(text, "Network is unreachable");
  EXPECT_LT(taken, std::chrono::seconds(10));
}

TEST(TcpStore, ServerThatEndsIsSaid) {
  auto server = std::make_unique<TcpStore>(TcpStoreOptions{.serve = true});
  TcpStore client({.port = server->port()});
  std::thread ends([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server.reset();
  });
  const auto start = Clock::now();
  EXPECT_HAS(error_of([&] { client.wait({"never"}, milliseconds(20000)); }),
             "closed the connection");
  ends.join();
  // And once more, over a new connection.
  EXPECT_HAS(error_of([&] { client.check({"never"}); }), "no store at");
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
}

TEST(TcpStore, TakesASocketThatListens) {
  const Socket listener = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  const int port = address_of(listener).port();
  for (int i = 0; i < 2; ++i) {  // it stays its owner's, and serves again
    TcpStore store({.port = port, .serve = true, .listen_fd = listener.fd()});
    EXPECT_EQ(store.port(), port);
    EXPECT_EQ(store.add("n", 1), 1);
  }
  EXPECT_HAS(error_of([] { TcpStore store({.serve = true, .listen_fd = STDIN_FILENO}); }),
             "SHERD_STORE_FD");
}

// ---- strangers

constexpr const char* kTokens[] = {"", "a secret"};

Socket connect_to_port(int port) {
  return connect_to(resolve("127.0.0.1", port, "test")[0], Clock::now() + milliseconds(5000));
}
bool is_closed(const Socket& s) {
  const auto deadline = Clock::now() + milliseconds(5000);
  for (char byte; receive_all(s, &byte, 1, deadline);) {
  }
  return Clock::now() < deadline;
}
std::string frame(const std::string& payload) {
  const auto n = uint32_t(payload.size());
  return std::string(reinterpret_cast<const char*>(&n), 4) + payload;
}
// Greets as a client of this token would, and then says `bytes`.
Socket after_greeting(int port, const std::string& token, const std::string& bytes) {
  Socket s = connect_to_port(port);
  std::string hello(8 + kNonceBytes, ' '), welcome(1 + kProofBytes, ' ');
  const std::string ours = make_nonce();
  const auto soon = Clock::now() + milliseconds(5000);
  EXPECT_TRUE(send_all(s, "SHERDST2" + ours) && receive_all(s, hello.data(), hello.size(), soon));
  EXPECT_TRUE(send_all(s, proof_of(token, "client", ours, hello.substr(8))));
  EXPECT_TRUE(receive_all(s, welcome.data(), welcome.size(), soon));
  EXPECT_TRUE(send_all(s, bytes));
  return s;
}

void expect_works(TcpStore& server, const std::string& token) {
  const auto start = Clock::now();
  const int64_t n = server.add("works", 1);
  TcpStore client({.port = server.port(), .timeout = milliseconds(5000), .token = token});
  EXPECT_EQ(client.add("works", 1), n + 1);
  EXPECT_LT(Clock::now() - start, milliseconds(4000));
}

// A peer that speaks otherwise is cut off, or stays silent; the store serves others all the while.
TEST(TcpStore, T_28_strangers_garbage_and_silence_hurt_nobody) {
  for (const std::string token : kTokens) {
    TcpStore server({.serve = true, .timeout = milliseconds(5000), .token = token});
    const int port = server.port();
    std::vector<Socket> open;
    open.push_back(connect_to_port(port));  // says nothing
    open.push_back(connect_to_port(port));  // half a greeting
    send_all(open[1], "SHER");
    open.push_back(connect_to_port(port));  // half a proof
    send_all(open[2], "SHERDST2" + make_nonce() + "12345");
    Socket http = connect_to_port(port);
    send_all(http, "GET / HTTP/1.1\r\n\r\n");
    EXPECT_TRUE(is_closed(http));
    const auto says = [&](const std::string& bytes) { return after_greeting(port, token, bytes); };
    EXPECT_TRUE(is_closed(says("\xff\xff\xff\xff")));             // a huge frame
    EXPECT_TRUE(is_closed(says(frame(""))));                      // no request
    EXPECT_TRUE(is_closed(says(frame(std::string(1, '\x63')))));  // no such request
    EXPECT_TRUE(is_closed(says(frame(std::string(9, '\x00')))));  // set, cut short
    EXPECT_TRUE(
        is_closed(says(frame(std::string(1, '\x00') + std::string(8, '\xff')))));  // negative size
    EXPECT_TRUE(is_closed(says(frame("\x05" + std::string(8, '\x7f')))));          // 2^62 keys
    open.push_back(says("\x40"));                                                  // half a frame
    expect_works(server, token);
  }
}

TEST(TcpStore, T_28_store_of_another_token_is_refused) {
  TcpStore server({.serve = true, .token = "one"});
  server.set("secret", "value");
  for (const std::string token : {"other", "", "one ", "On"}) {
    const auto start = Clock::now();
    const std::string e =
        error_of([&] { TcpStore client({.port = server.port(), .token = token}); });
    EXPECT_HAS(e, "has another token than this process");
    EXPECT_HAS(e, "SHERD_STORE_TOKEN");
    EXPECT_LT(Clock::now() - start, milliseconds(3000));
  }
  TcpStore client({.port = server.port(), .token = "one"});
  EXPECT_EQ(client.get("secret"), "value");
}

// Somebody who took the port learns nothing and is not believed.
TEST(TcpStore, T_28_impostor_of_a_server_is_refused) {
  const Socket listener = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  std::string heard(8 + kNonceBytes + kProofBytes, ' ');
  std::thread impostor([&] {
    Socket s(accept(listener.fd(), nullptr, nullptr));
    const auto soon = Clock::now() + milliseconds(5000);
    receive_all(s, heard.data(), 8 + kNonceBytes, soon);
    send_all(s, "SHERDST2" + make_nonce());
    receive_all(s, heard.data() + 8 + kNonceBytes, kProofBytes, soon);
    send_all(s, "Y" + heard.substr(8 + kNonceBytes));  // the client's own proof, sent back
    is_closed(s);
  });
  EXPECT_HAS(error_of([&] {
               TcpStore client({.port = address_of(listener).port(), .token = "a secret"});
             }),
             "has another token");
  impostor.join();
  EXPECT_EQ(heard.find("a secret"), std::string::npos);
}

TEST(TcpStore, T_28_port_scan_and_more_strangers_than_descriptors) {
  rlimit before, few;
  getrlimit(RLIMIT_NOFILE, &before);
  few = before;
  few.rlim_cur = 200;  // fewer than the connections that a store keeps waiting
  TcpStore server({.serve = true, .token = "a secret"});
  setrlimit(RLIMIT_NOFILE, &few);
  {
    std::vector<Socket> open;
    for (int i = 0; i < 80; ++i) open.push_back(connect_to_port(server.port()));
    for (int i = 0; i < 2000; ++i) connect_to_port(server.port());  // come and gone
    expect_works(server, "a secret");
  }
  setrlimit(RLIMIT_NOFILE, &before);
  {
    std::vector<Socket> open;
    for (int i = 0; i < 300; ++i) open.push_back(connect_to_port(server.port()));
    expect_works(server, "a secret");
    EXPECT_TRUE(is_closed(open[0]));  // the oldest made room
  }
}

// Random bytes, and messages of a real client with some of them changed, cut or repeated; before
// the greeting and after it. SHERD_FUZZ_SECONDS has it run for longer.
TEST(TcpStore, T_28_fuzzed_wire_changes_nothing) {
  const char* given = std::getenv("SHERD_FUZZ_SECONDS");
  const auto end = Clock::now() + milliseconds(given ? 1000 * std::atoi(given) : 5000);
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t n) { return random() % n; };
  const auto number = [](int64_t n) { return std::string(reinterpret_cast<const char*>(&n), 8); };
  const auto text = [&](const std::string& s) { return number(int64_t(s.size())) + s; };
  const std::vector<std::string> requests{
      std::string("\0", 1) + text("fuzz") + text("v"),
      std::string("\1", 1) + number(1) + text("fuzz") + number(0),
      std::string("\2", 1) + text("fuzz number") + number(1),
      std::string("\3", 1) + text("fuzz") + text("v") + text("w"),
      std::string("\4", 1) + number(2) + text("a") + text("b"),
      std::string("\5", 1) + number(1) + text("fuzz") + number(100),
      std::string("\6", 1) + text("fuzz"),
      std::string("\7", 1)};
  const std::string token = "a secret";
  TcpStore server({.serve = true, .timeout = milliseconds(5000), .token = token});
  server.set("kept", "value");
  int64_t connections = 0;
  for (; Clock::now() < end; ++connections) {
    std::string bytes;
    for (uint64_t n = 1 + below(4); n > 0; --n) bytes += frame(requests[below(requests.size())]);
    for (uint64_t n = below(6); n > 0; --n) {
      const size_t at = below(bytes.size());
      switch (below(5)) {
        case 0:
          bytes[at] = char(random());
          break;
        case 1:
          bytes[at] = char(below(3));
          break;
        case 2:
          bytes.insert(at, bytes.substr(0, below(40)));
          break;
        case 3:
          bytes.erase(at, below(9));
          bytes += ' ';
          break;
        default:
          bytes.replace(at, std::min<size_t>(8, bytes.size() - at), number(int64_t(random())));
      }
    }
    // A key of the job that the fuzz hits by chance would be no fault of the store's.
    if (bytes.find("kept") != std::string::npos || bytes.find("works") != std::string::npos)
      continue;
    if (below(3) > 0) {
      const Socket s = after_greeting(server.port(), token, bytes);
      char byte;
      if (below(2)) receive_all(s, &byte, 1, Clock::now() + milliseconds(1));
    } else {
      const Socket s = connect_to_port(server.port());
      if (below(2)) bytes = "SHERDST2" + bytes;
      send_all(s, bytes);
    }
    if (connections % 500 == 0) expect_works(server, token);
  }
  expect_works(server, token);
  EXPECT_EQ(server.get("kept"), "value");
  EXPECT_GT(connections, 100);
}

TEST(TcpStore, AnotherProgramAtThePortIsSaid) {
  const Socket listener = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  std::thread other([&] {
    Socket s(accept(listener.fd(), nullptr, nullptr));
    send_all(s, "220 smtp ready\r\n");
    char byte;
    receive_all(s, &byte, 1, Clock::now() + milliseconds(500));
  });
  EXPECT_HAS(
      error_of([&] {
        TcpStore client({.port = address_of(listener).port(), .timeout = milliseconds(2000)});
      }),
      "another program answers");
  other.join();
}

}  // namespace
}  // namespace sherd::dist
