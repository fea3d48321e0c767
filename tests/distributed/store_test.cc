// The stores: one map, whatever it is reached through, and what may go wrong on the way.
#include "distributed/store.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "distributed/tcp_store.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_TRUE(has(text, part)) << "'" << (part) << "' in: " << (text)

struct Kind {
  const char* name;
  std::function<std::shared_ptr<Store>()> make;
};
std::shared_ptr<Store> memory() { return std::make_shared<MemoryStore>(); }
std::shared_ptr<Store> tcp() { return std::make_shared<TcpStore>(TcpStoreOptions{.serve = true}); }

class Stores : public testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<Store> store_ = GetParam().make();
};

TEST_P(Stores, SetGetAddDelete) {
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

TEST_P(Stores, CompareSet) {
  Store& s = *store_;
  EXPECT_EQ(s.compare_set("k", "old", "new"), "old");  // absent: nothing is set
  EXPECT_FALSE(s.check({"k"}));
  EXPECT_EQ(s.compare_set("k", "", "first"), "first");
  EXPECT_EQ(s.compare_set("k", "wrong", "second"), "first");
  EXPECT_EQ(s.compare_set("k", "first", "second"), "second");
  EXPECT_EQ(s.get("k"), "second");
}

TEST_P(Stores, WaitEndsInTimeAndNamesTheKeys) {
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

TEST_P(Stores, WaitWakesWhenAnotherThreadSets) {
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
    testing::Values(Kind{"memory", memory}, Kind{"tcp", tcp},
                    Kind{"prefix_memory",
                         [] { return std::make_shared<PrefixStore>("p", memory()); }},
                    Kind{"prefix_tcp", [] { return std::make_shared<PrefixStore>("p", tcp()); }}),
    [](const auto& info) { return info.param.name; });

TEST(PrefixStore, KeepsKeysApart) {
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

TEST(TcpStore, ServesClients) {
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

TEST(TcpStore, PortInUseIsNamed) {
  TcpStore first({.serve = true});
  const std::string e = error_of([&] { TcpStore second({.port = first.port(), .serve = true}); });
  EXPECT_HAS(e, concat("127.0.0.1:", first.port()));
  EXPECT_HAS(e, "choose another --master_port");
}

TEST(TcpStore, NobodyThere) {
  const std::string e =
      error_of([] { TcpStore client({.port = 1, .timeout = milliseconds(200)}); });
  EXPECT_HAS(e, "tcp://127.0.0.1:1");
  EXPECT_HAS(e, "Connection refused");
  EXPECT_HAS(error_of([] { TcpStore client({.host = "no-such-host.invalid", .port = 1}); }),
             "no-such-host.invalid");
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
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  ends.join();
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

// A peer that speaks otherwise is cut off, or stays silent; the store serves others all the while.
TEST(TcpStore, GarbageAndSilenceHurtNobody) {
  TcpStore server({.serve = true, .timeout = milliseconds(5000)});
  const SocketAddress at = resolve("127.0.0.1", server.port(), "test")[0];
  std::vector<Socket> open;
  auto connect = [&] { return connect_to(at, Clock::now() + milliseconds(5000)); };
  auto is_closed = [](const Socket& s) {
    char byte;
    return !receive_all(s, &byte, 1, Clock::now() + milliseconds(5000));
  };
  open.push_back(connect());  // says nothing
  open.push_back(connect());  // half a greeting
  send_all(open[1], "SHER");
  Socket http = connect();
  send_all(http, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(is_closed(http));
  auto after_greeting = [&](const std::string& bytes) {
    Socket s = connect();
    char reply[8];
    EXPECT_TRUE(send_all(s, "SHERDST1"));
    EXPECT_TRUE(receive_all(s, reply, 8, Clock::now() + milliseconds(5000)));
    EXPECT_TRUE(send_all(s, bytes));
    return s;
  };
  auto frame = [](const std::string& payload) {
    const auto n = uint32_t(payload.size());
    return std::string(reinterpret_cast<const char*>(&n), 4) + payload;
  };
  EXPECT_TRUE(is_closed(after_greeting("\xff\xff\xff\xff")));             // a huge frame
  EXPECT_TRUE(is_closed(after_greeting(frame(""))));                      // no request
  EXPECT_TRUE(is_closed(after_greeting(frame(std::string(1, '\x63')))));  // no such request
  EXPECT_TRUE(is_closed(after_greeting(frame(std::string(9, '\x00')))));  // set, cut short
  EXPECT_TRUE(is_closed(
      after_greeting(frame(std::string(1, '\x00') + std::string(8, '\xff')))));    // negative size
  EXPECT_TRUE(is_closed(after_greeting(frame("\x05" + std::string(8, '\x7f')))));  // 2^62 keys
  open.push_back(after_greeting("\x40"));                                          // half a frame
  uint64_t state = 1;
  for (int i = 0; i < 200; ++i) {
    std::string noise;
    for (int k = 0; k < 40; ++k) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      noise += char(state >> 60);  // small numbers: they look like requests
    }
    Socket s = connect();
    send_all(s, (i % 2 ? "SHERDST1" : "") + frame(noise));
  }
  EXPECT_EQ(server.add("works", 1), 1);
  TcpStore client({.port = server.port(), .timeout = milliseconds(5000)});
  EXPECT_EQ(client.get("works"), "1");
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
