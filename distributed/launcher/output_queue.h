// OutputQueue: what waits to be written to the launcher's stdout and stderr, in one order over
// both, so that a reader who has stopped (less, Ctrl-S) holds up neither signals nor the ends of
// ranks.
//
//     queue.put(1, "[rank 0] step 1\n");
//     if (!queue.empty()) poll for POLLOUT on queue.fd(), then queue.write_some();
#pragma once
#include <deque>
#include <string>
#include <string_view>

namespace sherd::dist {

class OutputQueue {
 public:
  void put(int fd, std::string_view text);
  bool empty() const { return pieces_.empty(); }
  int fd() const { return pieces_.front().fd; }
  size_t bytes() const { return bytes_; }

  // At most what a pipe that polled as writable takes without blocking. Text for an fd whose reader
  // has gone is dropped, then and later; what cannot be written otherwise (a full disk) is lost.
  void write_some();
  bool is_broken(int fd) const { return broken_[fd]; }
  int lost(int fd) const { return lost_[fd]; }  // errno of the last text that was; 0: none
  void clear();

 private:
  struct Piece {
    int fd;
    std::string text;
    size_t written = 0;
  };
  void drop(int fd);

  std::deque<Piece> pieces_;
  size_t bytes_ = 0;
  bool broken_[3] = {false, false, false};
  int lost_[3] = {0, 0, 0};
};

}  // namespace sherd::dist
