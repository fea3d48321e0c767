#include "distributed/copy_bytes.h"

#include <immintrin.h>

#include <cstring>

namespace sherd::dist {
namespace {

// Sanitizers know memcpy, and not the stores past the caches.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kStreams = false;
#else
constexpr bool kStreams = true;
#endif

}  // namespace

void copy_bytes(char* to, const char* from, int64_t bytes, bool stream) {
  constexpr int64_t kLine = 64, kStep = 2 * kLine;
  if (!kStreams || !stream || bytes < 2 * kStep) {
    if (bytes) std::memcpy(to, from, bytes);
    return;
  }
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kStep <= bytes; at += kStep) {
    __m256i x[4];
    for (int k = 0; k < 4; ++k)
      x[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at) + k);
    for (int k = 0; k < 4; ++k) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at) + k, x[k]);
  }
  _mm_sfence();  // such stores are not ordered before a later flag by themselves
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace sherd::dist
