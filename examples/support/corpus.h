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

// Where the tokenizer of weights lies, for with another one they would be worth nothing: beside the
// checkpoints of a run's folder, and beside a file of weights, as w.tokenizer.model. From there
// load_corpus() takes it for --init_from and --resume.
std::string tokenizer_of_run(const std::string& folder);
std::string tokenizer_of_weights(const std::string& file);

// Puts it there; removes one of earlier weights if this corpus has none.
void keep_tokenizer(const Corpus& corpus, const std::string& path);

// Where a user's caches go: $XDG_CACHE_HOME/sherd or ~/.cache/sherd; made if need be.
std::string cache_folder();

}  // namespace examples
