#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/atomic_file.h"
#include "core/error.h"
#include "data/files.h"
#include "data/tokenizer.h"
#include "data/tokenizer_file.h"

// [Note: text and spelled bytes] SentencePiece sees "plain" text only: valid UTF-8 without control
// characters and without the characters that it uses as marks of its own. All else, newlines
// first of all, is spelled in single-byte tokens around it. So nothing is lost or changed, whatever
// the input, and no learnt token spans lines. Training and encoding cut the text in the same way.

namespace sherd::data {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";    // U+2581: stands for a space
constexpr std::string_view kUnknownMark = "\xE2\x96\x85";  // U+2585: a character left out
constexpr size_t kMaxPlainBytes = 8192;                    // of one piece given to SentencePiece

// Bytes of the character that begins `s`; 0 if it is no valid UTF-8 (RFC 3629).
size_t utf8_length(std::string_view s) {
  const auto byte = [&](size_t i) { return i < s.size() ? uint8_t(s[i]) : 0; };
  const auto follows = [&](size_t i, int low = 0x80, int high = 0xBF) {
    return byte(i) >= low && byte(i) <= high;
  };
  const int b = byte(0);
  if (b < 0x80) return 1;
  if (b >= 0xC2 && b <= 0xDF) return follows(1) ? 2 : 0;
  if (b >= 0xE0 && b <= 0xEF)
    return follows(1, b == 0xE0 ? 0xA0 : 0x80, b == 0xED ? 0x9F : 0xBF) && follows(2) ? 3 : 0;
  if (b >= 0xF0 && b <= 0xF4)
    return follows(1, b == 0xF0 ? 0x90 : 0x80, b == 0xF4 ? 0x8F : 0xBF) && follows(2) && follows(3)
               ? 4
               : 0;
  return 0;
}

// Calls plain(text) and spelled(bytes), in order.
template <class Plain, class Spelled>
void cut(std::string_view text, bool spell_spaces, const Plain& plain, const Spelled& spelled) {
  size_t start = 0, space = 0;  // of the plain run; of the last space in it
  const auto flush = [&](size_t end) {
    if (end > start) plain(text.substr(start, end - start));
    start = space = end;
  };
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    const size_t length = utf8_length(rest);
    const bool control = uint8_t(text[i]) < (spell_spaces ? 0x21 : 0x20) || text[i] == 0x7F;
    if (length == 0 || control || rest.starts_with(kSpaceMark) || rest.starts_with(kUnknownMark)) {
      flush(i);
      const size_t n = std::max(length, size_t(1));
      spelled(rest.substr(0, n));
      i += n;
      start = space = i;
      continue;
    }
    // Long lines are cut before a space, where learnt tokens begin: the ids are those of the whole.
    if (text[i] == ' ') space = i;
    if (i + length - start > kMaxPlainBytes) flush(space > start ? space : i);
    i += length;
  }
  flush(text.size());
}

class Pieces : public sentencepiece::SentenceIterator {
 public:
  explicit Pieces(std::vector<std::string_view> pieces) : pieces_(std::move(pieces)) { read(); }
  bool done() const override { return next_ == pieces_.size(); }
  void Next() override {
    ++next_;
    read();
  }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  void read() {
    if (!done()) value_ = pieces_[next_];
  }
  std::vector<std::string_view> pieces_;
  size_t next_ = 0;
  std::string value_;
};

std::vector<std::string_view> training_pieces(std::string_view text, int64_t max_bytes) {
  std::vector<std::string_view> pieces;
  cut(
      text, false, [&](std::string_view plain) { pieces.push_back(plain); },
      [](std::string_view) {});
  const double share = double(max_bytes) / double(std::max<size_t>(text.size(), 1));
  if (share >= 1) return pieces;
  std::vector<std::string_view> kept;
  for (size_t i = 0; i < pieces.size(); ++i)
    if (size_t(double(i + 1) * share) > size_t(double(i) * share)) kept.push_back(pieces[i]);
  return kept;
}

uint64_t key_of(std::string_view text, const BpeOptions& options) {
  return fnv1a(concat("bpe 1 ", options.vocab_size, " ", options.max_training_bytes), fnv1a(text));
}

// The number after `mark` in SentencePiece's message.
std::optional<int64_t> number_after(const std::string& message, std::string_view mark) {
  const size_t at = message.find(mark);
  if (at == std::string::npos) return std::nullopt;
  return std::atoll(message.c_str() + at + mark.size());
}

std::string train_model(std::string_view text, const BpeOptions& options) {
  if (options.vocab_size < 258 || options.vocab_size > 65536)
    fail("[BpeTokenizer] vocab_size must be 258 to 65536, got ", options.vocab_size,
         " (257 tokens are \"unknown\" and the single bytes; ids are uint16)");
  if (options.max_training_bytes < 1)
    fail("[BpeTokenizer] max_training_bytes must be at least 1, got ", options.max_training_bytes);
  auto pieces = training_pieces(text, options.max_training_bytes);
  if (pieces.empty()) fail("[BpeTokenizer] there is no text to train on");
  const std::unordered_map<std::string, std::string> settings = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocab_size)},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"byte_fallback", "true"},
      {"character_coverage", "0.9995"},
      {"max_sentence_length", std::to_string(2 * kMaxPlainBytes)},
      {"unk_id", "0"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "1"},
      {"minloglevel", "3"},
  };
  Pieces iterator(std::move(pieces));
  std::string model;
  // The trainer sets process-wide state (its log level), and ranks may be threads.
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &iterator, &model);
  if (status.ok()) return model;
  const std::string message = status.error_message();
  if (const auto most = number_after(message, "set it to a value <= "))
    fail("[BpeTokenizer] vocab_size ", options.vocab_size,
         " is more than this text supports: at most ", *most);
  if (const auto least = number_after(message, " vs ");
      least && message.find("required_chars") != std::string::npos)
    fail("[BpeTokenizer] vocab_size ", options.vocab_size,
         " is too small for the characters of this text: at least ", *least);
  fail("[BpeTokenizer] SentencePiece could not train: ", message);
}

}  // namespace

struct BpeTokenizer::Impl {
  std::string model;
  uint64_t key = 0;
  sentencepiece::SentencePieceProcessor processor;
  std::vector<std::string> texts;           // of each id
  std::array<uint16_t, 256> byte_ids = {};  // of each byte
  // Where the training text had next to no spaces, there is no token for the mark, and
  // SentencePiece would spell the mark, not the space.
  bool spell_spaces = false;
};

BpeTokenizer::~BpeTokenizer() = default;

BpeTokenizer::BpeTokenizer(std::string model, uint64_t key) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.model = std::move(model);
  m.key = key;
  const auto status = m.processor.LoadFromSerializedProto(m.model);
  if (!status.ok())
    fail("[BpeTokenizer] this is no SentencePiece model, or it is damaged: ",
         status.error_message());
  const int size = m.processor.GetPieceSize();
  if (size > 65536)
    fail("[BpeTokenizer] the model has ", size, " tokens; ids are uint16, so at most 65536");
  m.spell_spaces = m.processor.IsUnknown(m.processor.PieceToId(kSpaceMark));
  int bytes = 0;
  for (int id = 0; id < size; ++id) {
    std::string text = m.processor.IdToPiece(id);
    if (m.processor.IsByte(id)) {  // named <0x0A>
      const auto byte = uint8_t(std::strtol(text.c_str() + 3, nullptr, 16));
      m.byte_ids[byte] = uint16_t(id);
      text.assign(1, char(byte));
      ++bytes;
    } else if (m.processor.IsUnknown(id)) {
      text = "\xEF\xBF\xBD";  // U+FFFD, the replacement character
    } else if (m.processor.IsControl(id)) {
      text.clear();
    } else {
      for (size_t at; (at = text.find(kSpaceMark)) != std::string::npos;)
        text.replace(at, kSpaceMark.size(), 1, ' ');
    }
    m.texts.push_back(std::move(text));
  }
  constexpr std::string_view kProbe =
      " a  \xEF\xBC\xA1\xC2\xBD b\xE2\x84\xAB ";  // full-width A, ½, Å
  if (bytes != 256 || decode(encode(kProbe)) != kProbe)
    fail(
        "[BpeTokenizer] this SentencePiece model changes the text: it needs byte_fallback=true, "
        "normalization_rule_name=identity, add_dummy_prefix=false and "
        "remove_extra_whitespaces=false");
}

std::shared_ptr<BpeTokenizer> BpeTokenizer::train(std::string_view text,
                                                  const BpeOptions& options) {
  return std::make_shared<BpeTokenizer>(train_model(text, options), key_of(text, options));
}

std::shared_ptr<BpeTokenizer> BpeTokenizer::train_or_load(std::string_view text,
                                                          const BpeOptions& options,
                                                          const std::string& path) {
  try {
    const auto file = parse_tokenizer_file(read_file(path), path);
    if (file && file->kind == "bpe" && file->key == key_of(text, options))
      return std::make_shared<BpeTokenizer>(file->payload, file->key);
  } catch (const Error&) {
    // Missing or damaged: made anew.
  }
  auto tokenizer = train(text, options);
  tokenizer->save(path);
  return tokenizer;
}

int64_t BpeTokenizer::vocab_size() const { return int64_t(impl_->texts.size()); }

std::vector<uint16_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<uint16_t> ids;
  ids.reserve(text.size() / 3);
  std::vector<int> piece;
  cut(
      text, impl_->spell_spaces,
      [&](std::string_view plain) {
        const auto status = impl_->processor.Encode(plain, &piece);
        if (!status.ok())
          fail("[BpeTokenizer] SentencePiece could not encode: ", status.error_message());
        ids.insert(ids.end(), piece.begin(), piece.end());
      },
      [&](std::string_view bytes) {
        for (const char c : bytes) ids.push_back(impl_->byte_ids[uint8_t(c)]);
      });
  return ids;
}

std::string BpeTokenizer::decode(std::span<const uint16_t> ids) const {
  std::string text;
  for (const uint16_t id : ids) {
    if (id >= impl_->texts.size())
      fail("[BpeTokenizer] token ", id, " is not in the vocabulary (0 to ", impl_->texts.size() - 1,
           ")");
    text += impl_->texts[id];
  }
  return text;
}

std::string BpeTokenizer::serialize() const { return to_bytes({name(), impl_->key, impl_->model}); }

}  // namespace sherd::data
