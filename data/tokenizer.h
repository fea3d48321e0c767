// Tokenizer: text to token ids and back.
//
//     auto bpe = data::BpeTokenizer::train_or_load(text, {.vocab_size = 2048}, "run/bpe.model");
//     std::vector<uint16_t> ids = bpe->encode("In the beginning");
//     bpe->decode(ids);                                       // "In the beginning"
//     auto same = data::Tokenizer::load("run/bpe.model");
//
// decode(encode(x)) == x for every string of bytes, valid UTF-8 or not, spaces, tabs and newlines
// included. Ids fit into uint16, nanoGPT's token file format (data/token_dataset.h).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;  // "bytes", "bpe"
  virtual int64_t vocab_size() const = 0;
  virtual std::vector<uint16_t> encode(std::string_view text) const = 0;
  // Error for an id that is not below vocab_size. Ids that a model made up may be no valid UTF-8.
  virtual std::string decode(std::span<const uint16_t> ids) const = 0;

  void save(const std::string& path) const;  // in one step: see replace_file
  uint64_t fingerprint() const;              // of what save() writes
  // Of any kind; also a model of SentencePiece's own that leaves text as it is (see BpeTokenizer).
  // Error if the file is missing, damaged, or something else.
  static std::shared_ptr<Tokenizer> load(const std::string& path);
  static bool is_saved_at(const std::string& path);  // is this a file that save() wrote?

 protected:
  virtual std::string serialize() const = 0;
};

// One token a byte: no training, a vocabulary of 256.
class ByteTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int64_t vocab_size() const override { return 256; }
  std::vector<uint16_t> encode(std::string_view text) const override;
  std::string decode(std::span<const uint16_t> ids) const override;

 protected:
  std::string serialize() const override;
};

struct BpeOptions {
  int64_t vocab_size = 2048;  // up to 65536; 257 of them are "unknown" and the single bytes
  // A longer text is thinned out to about this many bytes for training, evenly and by line.
  int64_t max_training_bytes = 32 << 20;
};

// Byte-pair encoding by SentencePiece, with no normalisation. Characters that the training text
// hardly has, and newlines, tabs, NUL and invalid UTF-8, are spelled in single-byte tokens.
// Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units. ACL 2016.
class BpeTokenizer : public Tokenizer {
 public:
  // One thread and no sampling at random: the same text and options give the same bytes. 4.3 MB of
  // text take about a second. Error if the text is empty, or supports no vocabulary of this size
  // (says which it does).
  static std::shared_ptr<BpeTokenizer> train(std::string_view text, const BpeOptions& options = {});
  // The tokenizer in `path`, if it was made from this text and these options and is whole; else
  // trains, and writes `path`. Ranks and jobs may do this at once.
  static std::shared_ptr<BpeTokenizer> train_or_load(std::string_view text,
                                                     const BpeOptions& options,
                                                     const std::string& path);
  // From a serialised SentencePiece model. Error if it is damaged, or changes the text: it must
  // have byte_fallback, identity normalisation, no dummy prefix, and keep extra white space. `key`
  // says what it was trained on (train_or_load compares it); 0: not known.
  explicit BpeTokenizer(std::string model, uint64_t key = 0);
  ~BpeTokenizer() override;

  std::string name() const override { return "bpe"; }
  int64_t vocab_size() const override;
  std::vector<uint16_t> encode(std::string_view text) const override;
  std::string decode(std::span<const uint16_t> ids) const override;

 protected:
  std::string serialize() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sherd::data
