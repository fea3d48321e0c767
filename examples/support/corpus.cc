#include "examples/support/corpus.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

namespace examples {

using namespace sherd;
namespace fs = std::filesystem;

std::string cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const fs::path folder =
      (cache && *cache ? fs::path(cache) : fs::path(home ? home : "/tmp") / ".cache") / "sherd";
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    fail("cannot make the cache folder ", folder.string(), ": ", error.message(),
         ". Set XDG_CACHE_HOME");
  return folder.string();
}

namespace {

bool all_token_files(const std::vector<std::string>& paths) {
  return !paths.empty() &&
         std::all_of(paths.begin(), paths.end(), [](auto& p) { return p.ends_with(".bin"); });
}

data::TokenOptions token_options(const Options& o) {
  return {.sequence_length = o.seq_len, .vocab_size = o.vocab_size};
}

Corpus token_files(const Options& o) {
  Corpus c;
  c.train = std::make_shared<data::TokenDataset>(o.data, token_options(o));
  c.description = concat(c.train->token_count(), " tokens of ", o.data.size(), " file(s)");
  return c;
}

}  // namespace

Corpus load_corpus(const Options& o) {
  Corpus c;
  if (all_token_files(o.data)) {
    c = token_files(o);
  } else {
    for (auto& p : o.data)
      if (p.ends_with(".bin")) fail("--data mixes token files (", p, ") and text: give one kind");
    const std::string text = o.data.empty() ? data::bible_text() : data::read_text(o.data);
    auto [train, held_out] = data::hold_out(text);
    if (!o.val_data.empty()) train = text, held_out = {};
    if (o.tokenizer == "bytes") {
      if (o.vocab_size < 256)
        fail("--vocab_size=", o.vocab_size, " is smaller than the 256 tokens of --tokenizer=bytes");
      c.tokenizer = std::make_shared<data::ByteTokenizer>();
    } else {
      const std::string path =
          (fs::path(cache_folder()) / concat("tokenizer-", o.vocab_size, ".model")).string();
      c.tokenizer = data::BpeTokenizer::train_or_load(train, {.vocab_size = o.vocab_size}, path);
    }
    c.train = std::make_shared<data::TokenDataset>(
        data::TokenDataset::from_text(train, *c.tokenizer, o.seq_len));
    if (!held_out.empty())
      c.validation = std::make_shared<data::TokenDataset>(
          data::TokenDataset::from_text(held_out, *c.tokenizer, o.seq_len));
    c.description = concat(text.size() / 1'000'000.0 < 1 ? concat(text.size() / 1000, " kB")
                                                         : concat(text.size() / 1'000'000, " MB"),
                           " of text, ", c.train->token_count(), " tokens (", c.tokenizer->name(),
                           ", ", c.tokenizer->vocab_size(), " words)");
  }
  if (!o.val_data.empty()) {
    if (all_token_files(o.val_data))
      c.validation = std::make_shared<data::TokenDataset>(o.val_data, token_options(o));
    else if (c.tokenizer)
      c.validation = std::make_shared<data::TokenDataset>(
          data::TokenDataset::from_text(data::read_text(o.val_data), *c.tokenizer, o.seq_len));
    else
      fail("--val_data is text, but --data are token files: their tokenizer is not known");
  }
  if (c.validation && c.tokenizer) c.bytes_per_token = c.validation->bytes_per_token();
  return c;
}

}  // namespace examples
