// TcpStore: the Store of ranks that are processes. Rank 0's process runs the server, on a thread of
// its own; every rank, 0 as well, is a client.
//
//     TcpStore store({.host = "10.0.0.1", .port = 29500, .serve = rank == 0});
//
// [Note: store protocol] A client says "SHERDST2" and a random number, and gets both words from the
// server; then each shows that it knows the token (store_token.h), the client first. Then frames
// both ways: length (4 bytes), and as many bytes; a request is a number (what) and its fields, an
// answer a number (how it went) and one field. All numbers are little endian. Waiting is done in
// the server, which answers when the keys are there or the time is up.
//
// [Note: strangers] Who says anything else, or does not show the token in 10 s, is cut off; at most
// 256 connections are between the two at a time, the oldest making room, and they hold a few bytes
// each. Without a token, a store that is reached from other machines takes only addresses of the
// networks that this machine is itself on.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/socket.h"
#include "distributed/store.h"

namespace sherd::dist {

class TcpStoreServer {
 public:
  TcpStoreServer(Socket listener, std::string token);
  ~TcpStoreServer();
  int port() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

// Nobody answered at the address in time.
class StoreUnreachable : public Error {
 public:
  using Error::Error;
};

struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  int port = 0;             // 0 where this process serves: any free one
  bool serve = false;       // this process runs the server
  int listen_fd = -1;       // serve on this socket, which listens already and stays its owner's
  bool everywhere = false;  // serve on all addresses, though `host` may mean a loopback here
  Milliseconds timeout = kDefaultTimeout;               // for connecting, and of the store
  std::string token = {};                               // the same on all clients and the server
  Milliseconds answer_time = std::chrono::seconds(30);  // for a server that is slow, not gone
  Milliseconds quiet_time = std::chrono::seconds(10);   // then who looks for it says so on stderr
};

class TcpStore : public Store {
 public:
  // Error: the host is unknown, the port is in use, nobody answered in time, another program did,
  // or the store has another token.
  explicit TcpStore(const TcpStoreOptions& options);
  ~TcpStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override;
  bool check(const std::vector<std::string>& keys) override;
  using Store::wait;
  void wait(const std::vector<std::string>& keys, Milliseconds timeout) override;
  bool delete_key(const std::string& key) override;
  int64_t num_keys() override;
  std::string name() const override { return concat("tcp://", host_, ":", port_); }
  int port() const { return port_; }
  // The end, called on all ranks: the server ends, and clients wait until it has, `patience` at
  // most, so that a next store on the same port is not mistaken for this one.
  void leave(Milliseconds patience);
  // The numeric address at which the server was reached.
  const SocketAddress& server_address() const { return server_address_; }

 private:
  std::string ask(const std::string& request, Milliseconds patience);
  // `again`: the store was there before, so that a port where nobody listens means that it has
  // ended.
  Socket connect(std::chrono::steady_clock::time_point deadline, bool again);
  bool greet(const Socket& socket, const SocketAddress& address,
             std::chrono::steady_clock::time_point deadline);

  std::string host_;
  int port_;
  std::string token_;
  Milliseconds answer_time_, quiet_time_;
  std::unique_ptr<TcpStoreServer> server_;
  std::vector<SocketAddress> addresses_;
  SocketAddress server_address_;
  std::mutex mutex_;
  std::vector<Socket> idle_;  // a call takes one, so that a long wait holds nobody up
};

}  // namespace sherd::dist
