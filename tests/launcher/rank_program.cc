// A rank for the launcher's tests: `rank_program MODE ...`.
//
//   store        rank 0 takes over SHERD_STORE_FD and prints "met N"; the others connect to it
//   print N      N numbered lines, written in pieces of a few bytes, in turn to stdout and stderr
//   flood        prints for ever
//   fds          prints which fds above 2 are open
//   throw        an uncaught exception
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>

namespace {

int number(const char* name) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : -1;
}

int store() {
  const int world_size = number("WORLD_SIZE");
  if (number("RANK") != 0) {
    if (std::getenv("SHERD_STORE_FD")) return 10;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(number("MASTER_PORT")));
    inet_pton(AF_INET, std::getenv("MASTER_ADDR"), &address.sin_addr);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    // No retry: it listened before any rank was started.
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return 11;
    char byte = 0;
    return write(fd, "x", 1) == 1 && read(fd, &byte, 1) == 1 && byte == 'y' ? 0 : 12;
  }
  usleep(100'000);
  const int listener = number("SHERD_STORE_FD");
  sockaddr_in bound{};
  socklen_t length = sizeof bound;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &length) != 0) return 13;
  if (ntohs(bound.sin_port) != number("MASTER_PORT")) return 14;
  for (int peer = 1; peer < world_size; ++peer) {
    const int fd = accept(listener, nullptr, nullptr);
    char byte = 0;
    if (read(fd, &byte, 1) != 1 || write(fd, "y", 1) != 1) return 15;
  }
  std::printf("met %d\n", world_size - 1);
  return 0;
}

int print(int n) {
  const int rank = number("RANK");
  std::mt19937 random(static_cast<unsigned>(rank));
  std::string pending[2];
  const auto write_pieces = [&](int to, size_t keep) {
    while (pending[to].size() > keep) {
      const size_t size = std::min<size_t>(1 + random() % 60, pending[to].size());
      if (write(to + 1, pending[to].data(), size) != static_cast<ssize_t>(size)) std::exit(1);
      pending[to].erase(0, size);
    }
  };
  for (int i = 0; i < n; ++i) {
    const std::string tag = std::to_string(rank) + ":" + std::to_string(i);
    const int to = i % 2;
    pending[to] += "<" + tag + std::string(1 + random() % 40, '.') + tag + ">\n";
    write_pieces(to, random() % 80);
  }
  for (int to : {0, 1}) {
    pending[to] += "<end " + std::to_string(rank) + ">";
    write_pieces(to, 0);
  }
  return 0;
}

int flood() {
  while (true) std::puts("a line that fills every pipe");
}

int fds() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    if (std::stoi(entry.path().filename()) > 2 && target.find("/proc/") == std::string::npos) {
      std::printf("open %s %s\n", entry.path().filename().c_str(), target.c_str());
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "store") return store();
  if (mode == "print") return print(std::atoi(argv[2]));
  if (mode == "flood") return flood();
  if (mode == "fds") return fds();
  if (mode == "throw") throw std::runtime_error("[matmul] shapes differ");
  return 99;
}
