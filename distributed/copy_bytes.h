// copy_bytes: what an exchange copies from one rank's memory into another's tensors.
//
//     const bool stream = all_bytes >= kStreamBytes;
//     copy_bytes(to, from, bytes, stream);
//
// A store brings the line that it changes into the cache first, so that a copy moves three bytes a
// byte. Written past the caches it moves two, and what does not stay there anyhow pushes nothing
// else out (docs/performance.md has the measurement). Data that fit into the caches are better off
// there, for somebody is about to read them.
#pragma once
#include <cstdint>

namespace sherd::dist {

// Bytes that a rank copies out of its peers' tensors in one exchange, or of its own in one part,
// from which on they go past the caches.
inline constexpr int64_t kStreamBytes = int64_t(8) << 20;

// The two do not overlap. With `stream`, what was written is there for every thread that learns of
// it in the usual ways (an atomic, a lock) after the return.
void copy_bytes(char* to, const char* from, int64_t bytes, bool stream);

}  // namespace sherd::dist
