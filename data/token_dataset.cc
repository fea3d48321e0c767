#include "data/token_dataset.h"

#include <algorithm>
#include <bit>

#include "core/atomic_file.h"
#include "data/files.h"
#include "data/tokenizer.h"

namespace sherd::data {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

TokenDataset::TokenDataset(const std::vector<std::string>& files, const TokenOptions& options)
    : options_(options) {
  if (files.empty()) fail("[TokenDataset] no file was given");
  for (const auto& path : files) {
    auto file = std::make_shared<MappedFile>(path);
    const std::string_view bytes = file->bytes();
    if (bytes.empty()) fail("[TokenDataset] '", path, "' is empty");
    if (bytes.size() % 2 != 0)
      fail("[TokenDataset] '", path, "' has ", bytes.size(),
           " bytes, not a whole number of 2-byte tokens: it was cut short, or is not a file of "
           "uint16 tokens");
    parts_.push_back({concat("'", path, "'"),
                      {reinterpret_cast<const uint16_t*>(bytes.data()), bytes.size() / 2},
                      std::move(file)});
  }
  finish();
}

TokenDataset::TokenDataset(std::vector<uint16_t> tokens, const TokenOptions& options)
    : options_(options) {
  auto owner = std::make_shared<const std::vector<uint16_t>>(std::move(tokens));
  parts_.push_back({"the tokens in memory", *owner, owner});
  finish();
}

TokenDataset TokenDataset::from_text(std::string_view text, const Tokenizer& tokenizer,
                                     int64_t sequence_length) {
  return TokenDataset(tokenizer.encode(text), {.sequence_length = sequence_length,
                                               .vocab_size = tokenizer.vocab_size(),
                                               .raw_bytes = int64_t(text.size())});
}

void TokenDataset::finish() {
  const int64_t T = options_.sequence_length;
  if (T < 1) fail("[TokenDataset] sequence_length must be at least 1, got ", T);
  if (options_.vocab_size < 1)
    fail("[TokenDataset] vocab_size must be at least 1, got ", options_.vocab_size);
  if (options_.raw_bytes < 0)
    fail("[TokenDataset] raw_bytes must not be negative, got ", options_.raw_bytes);
  for (auto& part : parts_) {
    part.start = token_count_;
    token_count_ += int64_t(part.tokens.size());
  }
  const std::string source =
      parts_.size() == 1 ? parts_[0].name : concat(parts_.size(), " files from ", parts_[0].name);
  take_range();
  if (token_count_ <= T)
    fail("[TokenDataset] ", source,
         options_.offset > 0 || options_.length >= 0 ? " (the range)" : "", ": ", token_count_,
         " tokens are too few for one sample, which takes sequence_length + 1 = ", uint64_t(T) + 1);
  check_ids();
  size_ = (token_count_ - 1) / T;
}

void TokenDataset::take_range() {
  const int64_t offset = options_.offset, rest = token_count_ - offset;
  const int64_t length = options_.length < 0 ? rest : options_.length;
  if (offset < 0 || rest < 0 || options_.length < -1 || length > rest)
    fail("[TokenDataset] the range of offset ", offset, " and length ", options_.length,
         " does not lie within the ", token_count_, " tokens there are");
  std::vector<Part> kept;
  for (auto& part : parts_) {
    const int64_t begin = std::max(offset, part.start);
    const int64_t end = std::min(offset + length, part.start + int64_t(part.tokens.size()));
    if (begin >= end) continue;
    part.tokens = part.tokens.subspan(size_t(begin - part.start), size_t(end - begin));
    part.skipped = begin - part.start;
    part.start = begin - offset;
    kept.push_back(std::move(part));
  }
  parts_ = std::move(kept);
  token_count_ = length;
}

void TokenDataset::check_ids() const {
  if (options_.vocab_size >= 65536) return;
  const auto vocab_size = uint16_t(options_.vocab_size);
  for (const auto& part : parts_) {
    const auto tokens = part.tokens;
    constexpr size_t kPiece = 1 << 16;
    for (size_t begin = 0; begin < tokens.size(); begin += kPiece) {
      const auto piece = tokens.subspan(begin, std::min(kPiece, tokens.size() - begin));
      uint16_t most = 0;
      for (const uint16_t id : piece) most = std::max(most, id);  // vectorised
      if (most < vocab_size) continue;
      const auto bad =
          std::find_if(piece.begin(), piece.end(), [&](uint16_t id) { return id >= vocab_size; });
      fail("[TokenDataset] ", part.name, " holds token ", *bad, " at position ",
           part.skipped + int64_t(begin) + (bad - piece.begin()), ", but the vocabulary has ",
           options_.vocab_size, " (0 to ", options_.vocab_size - 1,
           "): the file was made with another tokenizer, or vocab_size is too small");
    }
  }
}

Sample TokenDataset::get(int64_t index) const {
  if (index < 0 || index >= size_)
    fail("[TokenDataset] sample ", index, " was asked for; there are ", size_);
  const int64_t T = options_.sequence_length;
  std::vector<uint16_t> ids(size_t(T) + 1);
  read(index * T, ids);
  Tensor input_ids = empty({T}, kInt64), labels = empty({T}, kInt64);
  std::copy(ids.begin(), ids.end() - 1, input_ids.data<int64_t>());
  std::copy(ids.begin() + 1, ids.end(), labels.data<int64_t>());
  return {{"input_ids", input_ids}, {"labels", labels}};
}

void TokenDataset::read(int64_t begin, std::span<uint16_t> tokens) const {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](int64_t i, const Part& p) { return i < p.start; }) -
              1;
  for (size_t done = 0; done < tokens.size(); ++part) {
    const auto rest = part->tokens.subspan(size_t(begin + int64_t(done) - part->start));
    const size_t count = std::min(rest.size(), tokens.size() - done);
    std::copy_n(rest.begin(), count, tokens.begin() + std::ptrdiff_t(done));
    done += count;
  }
}

uint64_t TokenDataset::fingerprint() const {
  constexpr int64_t kPieces = 512, kPiece = 4096;
  const int64_t pieces = std::min(kPieces, (token_count_ + kPiece - 1) / kPiece);
  const int64_t length = std::min(kPiece, token_count_);
  std::vector<uint64_t> sums = {uint64_t(token_count_), uint64_t(options_.sequence_length)};
  std::vector<uint16_t> tokens(size_t(length), 0);
  for (int64_t i = 0; i < pieces; ++i) {
    read(pieces == 1 ? 0 : int64_t(double(token_count_ - length) * double(i) / double(pieces - 1)),
         tokens);
    sums.push_back(checksum_of(tokens.data(), length * int64_t(sizeof tokens[0])));
  }
  return checksum_of(sums.data(), int64_t(sums.size() * sizeof sums[0]));
}

double TokenDataset::bytes_per_token() const {
  if (options_.raw_bytes == 0)
    fail(
        "[TokenDataset] bytes_per_token needs raw_bytes, the size of the text that the tokens "
        "were made from");
  return double(options_.raw_bytes) / double(token_count_);
}

void write_tokens(const std::string& path, std::span<const uint16_t> tokens) {
  replace_file(path, {reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()});
}

}  // namespace sherd::data
