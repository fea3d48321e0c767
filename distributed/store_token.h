// The secret that the ranks of a job share, and how each end of a store's connection shows that it
// knows it.
//
//     setenv("SHERD_STORE_TOKEN", make_token().c_str(), 1);    // what sherdrun does for its ranks
//
// The token itself never travels: each end answers the other's random number with an HMAC-SHA256
// (RFC 2104) under the token, so that neither listening in nor taking the store's port gives it
// away.
#pragma once
#include <string>
#include <string_view>

namespace sherd::dist {

inline constexpr const char* kTokenVariable = "SHERD_STORE_TOKEN";

std::string token_from_environment();  // empty: there is none

std::string make_token();  // 32 random hexadecimal digits

inline constexpr size_t kNonceBytes = 16, kProofBytes = 32;

std::string make_nonce();  // kNonceBytes random bytes

// What the `role` ("client", "server") answers to both ends' nonces: kProofBytes.
std::string proof_of(const std::string& token, std::string_view role, std::string_view client_nonce,
                     std::string_view server_nonce);

// In a time that does not depend on where they differ.
bool same_proof(std::string_view a, std::string_view b);

}  // namespace sherd::dist
