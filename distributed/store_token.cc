#include "distributed/store_token.h"

#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

#include "core/error.h"
#include "distributed/hex.h"

namespace sherd::dist {

std::string token_from_environment() {
  const char* token = std::getenv(kTokenVariable);
  return token ? token : "";
}

std::string make_nonce() {
  std::string bytes(kNonceBytes, '\0');
  // So few bytes come at once and whole.
  if (getrandom(bytes.data(), bytes.size(), 0) != ssize_t(bytes.size()))
    fail("[store] the system gives no random numbers");
  return bytes;
}

std::string make_token() { return hex_of(make_nonce()); }

std::string proof_of(const std::string& token, std::string_view role, std::string_view client_nonce,
                     std::string_view server_nonce) {
  hmac_sha256_ctx hmac;
  const auto bytes = [](std::string_view s) { return reinterpret_cast<const uint8_t*>(s.data()); };
  hmac_sha256_set_key(&hmac, token.size(), bytes(token));
  for (const std::string_view s : {role, client_nonce, server_nonce})
    hmac_sha256_update(&hmac, s.size(), bytes(s));
  std::string proof(kProofBytes, '\0');
  hmac_sha256_digest(&hmac, proof.size(), reinterpret_cast<uint8_t*>(proof.data()));
  return proof;
}

bool same_proof(std::string_view a, std::string_view b) {
  return a.size() == b.size() && memeql_sec(a.data(), b.data(), a.size());
}

}  // namespace sherd::dist
