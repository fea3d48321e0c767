#include "distributed/launcher/output_queue.h"

#include <errno.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>

namespace sherd::dist {

void OutputQueue::put(int fd, std::string_view text) {
  if (broken_[fd]) return;
  // Small pieces of one fd share a write; a bound keeps what is moved in write_some() small.
  if (pieces_.empty() || pieces_.back().fd != fd || pieces_.back().text.size() > PIPE_BUF) {
    pieces_.push_back({fd, {}});
  }
  pieces_.back().text += text;
  bytes_ += text.size();
}

void OutputQueue::write_some() {
  Piece& piece = pieces_.front();
  const size_t left = piece.text.size() - piece.written;
  const ssize_t n =
      write(piece.fd, piece.text.data() + piece.written, std::min<size_t>(left, PIPE_BUF));
  if (n < 0) {
    if (errno == EPIPE) {
      drop(piece.fd);
    } else if (errno != EINTR && errno != EAGAIN) {
      lost_[piece.fd] = errno;
      bytes_ -= left;
      pieces_.pop_front();
    }
    return;
  }
  piece.written += static_cast<size_t>(n);
  bytes_ -= static_cast<size_t>(n);
  if (piece.written == piece.text.size()) pieces_.pop_front();
}

void OutputQueue::drop(int fd) {
  broken_[fd] = true;
  std::erase_if(pieces_, [&](const Piece& piece) {
    if (piece.fd == fd) bytes_ -= piece.text.size() - piece.written;
    return piece.fd == fd;
  });
}

void OutputQueue::clear() {
  pieces_.clear();
  bytes_ = 0;
}

}  // namespace sherd::dist
