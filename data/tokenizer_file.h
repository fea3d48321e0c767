// What is common to tokenizers' files: one line of text (kind, key, checksum), then the payload.
// The key says what a tokenizer was made from, so that a cached one can be told from a stale one.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sherd::data {

struct TokenizerFile {
  std::string kind;
  uint64_t key = 0;
  std::string payload;
};

uint64_t fnv1a(std::string_view bytes, uint64_t hash = 0xcbf29ce484222325u);

std::string to_bytes(const TokenizerFile& file);
// None if the bytes do not begin as such a file. Error that names `path` if they are damaged.
std::optional<TokenizerFile> parse_tokenizer_file(std::string_view bytes, const std::string& path);

}  // namespace sherd::data
