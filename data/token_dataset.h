// TokenDataset: a language model's samples from one long run of tokens, in nanoGPT's file format
// (uint16, little-endian, nothing else), or in memory.
//
//     data::TokenDataset train({"a.bin", "b.bin"}, {.sequence_length = 128, .vocab_size = 2048});
//     train.get(3).at("input_ids");     // int64 [T]: tokens 3T to 4T
//     train.get(3).at("labels");        // int64 [T]: tokens 3T + 1 to 4T + 1
//
//     auto validation = data::TokenDataset::from_text(text, tokenizer, 128);
//     double bits_per_byte = nats_per_token / std::log(2.) / validation.bytes_per_token();
//
// Several files are one run, in the order given, so a sample may begin in one and end in the next.
// N tokens make (N - 1) / T samples, rounded down; the last one's labels may be the last token.
// Files are mapped, not read: ranks of a machine share their pages.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"

namespace sherd::data {

class MappedFile;
class Tokenizer;

struct TokenOptions {
  int64_t sequence_length = 0;  // T, at least 1
  int64_t vocab_size = 65536;   // ids are 0 to vocab_size - 1
  int64_t offset = 0;           // of the run, in tokens: what is before it is left out
  int64_t length = -1;          // of the run from `offset` on, in tokens; -1: to the end
  int64_t raw_bytes = 0;        // of the text that the tokens were made from; 0: not known
};

class TokenDataset : public Dataset {
 public:
  // Error if a file is missing, empty or of an odd number of bytes, if the tokens are too few for
  // one sample, or if an id is not below vocab_size (names file and position: all are looked at
  // once, at the speed of memory).
  TokenDataset(const std::vector<std::string>& files, const TokenOptions& options);
  TokenDataset(std::vector<uint16_t> tokens, const TokenOptions& options);
  // The text through the tokenizer, with its vocab_size, and raw_bytes known.
  static TokenDataset from_text(std::string_view text, const Tokenizer& tokenizer,
                                int64_t sequence_length);

  int64_t size() const override { return size_; }
  Sample get(int64_t index) const override;
  // Of the numbers of tokens and of those a sample, and of 512 pieces of 4096 tokens, evenly
  // spaced: of all tokens, if they are fewer. However the run is cut into files.
  uint64_t fingerprint() const override;

  int64_t sequence_length() const { return options_.sequence_length; }
  int64_t token_count() const { return token_count_; }  // N
  // Bytes of raw text a token, on average. Error if raw_bytes was not given.
  double bytes_per_token() const;

 private:
  struct Part {
    std::string name;
    std::span<const uint16_t> tokens;
    std::shared_ptr<const void> owner;
    int64_t start = 0;    // of this part in the run
    int64_t skipped = 0;  // tokens of the file before this part
  };
  void take_range();  // cuts parts_ to [offset, offset + length)
  void check_ids() const;
  void finish();
  // Copies tokens [begin, begin + count) of the run.
  void read(int64_t begin, std::span<uint16_t> tokens) const;

  TokenOptions options_;
  std::vector<Part> parts_;
  int64_t token_count_ = 0;
  int64_t size_ = 0;
};

// Writes tokens in the format that TokenDataset reads.
void write_tokens(const std::string& path, std::span<const uint16_t> tokens);

}  // namespace sherd::data
