// What big_model trains on: token files as they are, or text through a tokenizer.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "examples/support/options.h"
#include "sherd.h"

namespace examples {

struct Corpus {
  std::shared_ptr<sherd::data::Tokenizer> tokenizer;        // none for .bin files
  std::shared_ptr<sherd::data::Dataset> train, validation;  // validation may be missing
  double bytes_per_token = 0;                               // of the validation text; 0: not known
  std::string description;                                  // one line
};

// Reads what the options say; trains the tokenizer or takes it from its cache. Every rank calls it;
// rank 0 first, so that the others find the cache. Errors are one line.
Corpus load_corpus(const Options& options);

// Puts its tokenizer there (see cli/kept_tokenizer.h), from where load_corpus() takes it for
// --init_from and --resume; removes one of earlier weights if this corpus has none.
void keep_tokenizer(const Corpus& corpus, const std::string& path);

// Where a user's caches go: $XDG_CACHE_HOME/sherd or ~/.cache/sherd; made if need be.
std::string cache_folder();

}  // namespace examples
