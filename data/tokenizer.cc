#include "data/tokenizer.h"

#include <cstdio>
#include <fstream>

#include "core/atomic_file.h"
#include "core/error.h"
#include "data/files.h"
#include "data/tokenizer_file.h"

namespace sherd::data {
namespace {
constexpr std::string_view kMagic = "sherd tokenizer 1 ";
}  // namespace

uint64_t fnv1a(std::string_view bytes, uint64_t hash) {
  for (const char c : bytes) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
  return hash;
}

std::string to_bytes(const TokenizerFile& file) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, " key=%016llx checksum=%016llx\n",
                static_cast<unsigned long long>(file.key),
                static_cast<unsigned long long>(fnv1a(file.payload)));
  return concat(kMagic, file.kind, numbers, file.payload);
}

std::optional<TokenizerFile> parse_tokenizer_file(std::string_view bytes, const std::string& path) {
  if (!bytes.starts_with(kMagic)) return std::nullopt;
  const std::string line(bytes.substr(0, std::min(bytes.find('\n'), size_t(256))));
  char kind[17];
  unsigned long long key, checksum;
  const int read = std::sscanf(line.c_str() + kMagic.size(), "%16[a-z] key=%16llx checksum=%16llx",
                               kind, &key, &checksum);
  if (read != 3 || bytes.size() == line.size() || fnv1a(bytes.substr(line.size() + 1)) != checksum)
    fail("[Tokenizer] '", path, "' is damaged: its checksum does not fit its content");
  return TokenizerFile{kind, key, std::string(bytes.substr(line.size() + 1))};
}

void Tokenizer::save(const std::string& path) const { replace_file(path, serialize()); }

bool Tokenizer::is_saved_at(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string start(kMagic.size(), '\0');
  return file.read(start.data(), int64_t(start.size())) && start == kMagic;
}

uint64_t Tokenizer::fingerprint() const { return fnv1a(serialize()); }

std::shared_ptr<Tokenizer> Tokenizer::load(const std::string& path) {
  std::string bytes = read_file(path);
  if (bytes.empty()) fail("[Tokenizer] '", path, "' is empty");
  const auto file = parse_tokenizer_file(bytes, path);
  const std::string kind = file ? file->kind : "bpe";
  if (kind == "bytes") return std::make_shared<ByteTokenizer>();
  if (kind != "bpe") fail("[Tokenizer] '", path, "' is of the unknown kind '", kind, "'");
  try {
    if (file) return std::make_shared<BpeTokenizer>(file->payload, file->key);
    return std::make_shared<BpeTokenizer>(std::move(bytes));
  } catch (const Error& error) {
    fail("[Tokenizer] '", path, "': ", error.what());
  }
}

std::vector<uint16_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<uint16_t> ids(text.size());
  for (size_t i = 0; i < text.size(); ++i) ids[i] = uint8_t(text[i]);
  return ids;
}

std::string ByteTokenizer::decode(std::span<const uint16_t> ids) const {
  std::string text(ids.size(), '\0');
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] > 255) fail("[ByteTokenizer] token ", ids[i], " is no byte (0 to 255)");
    text[i] = char(ids[i]);
  }
  return text;
}

std::string ByteTokenizer::serialize() const { return to_bytes({name(), 0, {}}); }

}  // namespace sherd::data
