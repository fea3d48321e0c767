#include "examples/support/corpus.h"

#include <fcntl.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cli/kept_tokenizer.h"
#include "distributed/checkpoint/checkpoint_folder.h"

namespace examples {

using namespace sherd;
namespace fs = std::filesystem;

std::string cache_folder() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (const passwd* user = home && *home ? nullptr : getpwuid(getuid())) home = user->pw_dir;
  fs::path folder;
  if (cache && *cache == '/')
    folder = fs::path(cache) / "sherd";
  else if (home && *home)
    folder = fs::path(home) / ".cache" / "sherd";
  else
    fail("no place for the cache: set XDG_CACHE_HOME to a folder");
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error && ::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    error = std::error_code(errno, std::generic_category());
  if (error)
    fail("cannot write into the cache folder ", folder.string(), ": ", error.message(),
         ". Set XDG_CACHE_HOME to another");
  return folder.string();
}

namespace {

// What is wrong with data is said with the flag that gave them.
template <class F>
auto with_flag(const char* flag, const std::vector<std::string>& paths, F f) {
  try {
    return f();
  } catch (const Error& e) {
    if (paths.empty()) throw;
    fail(flag, "=", paths[0], paths.size() > 1 ? concat(" and ", paths.size() - 1, " more") : "",
         ": ", e.what());
  }
}

// How many files are read. Those of folders that are no text are passed over, and that is said.
std::string files_of_text(const std::vector<std::string>& paths) {
  constexpr int kNamed = 5;
  std::string names;
  int count = 0;
  size_t files = 0;
  for (auto& path : paths) {
    const std::vector<std::string> taken = data::text_files(path);
    files += taken.size();
    if (!fs::is_directory(path)) continue;
    for (fs::recursive_directory_iterator it(path), end; it != end; ++it) {
      const std::string name = it->path().string();
      const bool hidden = it->path().filename().string().starts_with('.');
      if (hidden && it->is_directory()) it.disable_recursion_pending();
      if (hidden || !it->is_regular_file() || std::binary_search(taken.begin(), taken.end(), name))
        continue;
      if (++count <= kNamed)
        names += (names.empty() ? "" : ", ") + fs::relative(name, path).string();
    }
  }
  if (count > kNamed) names += concat(" and ", count - kNamed, " more");
  return concat(" of ", files, " file(s)",
                names.empty() ? "" : concat(" (passed over as no text: ", names, ")"));
}

std::string text_of(const std::vector<std::string>& paths) {
  for (auto& path : paths) {
    if (!fs::is_directory(path)) continue;
    int files = 0, token_files = 0;
    for (auto& entry : fs::directory_iterator(path)) {
      ++files;
      token_files += entry.path().extension() == ".bin";
    }
    if (files > 0 && files == token_files)
      fail("the folder holds .bin files alone: to train on tokens, name the files");
  }
  return data::read_text(paths);
}

// Samples of one kind of source, and what is known of them.
struct Source {
  std::shared_ptr<data::Dataset> samples;
  int64_t tokens = 0;
  double bytes_per_token = 0, fill = 1;
};

Source packed(const Options& o, std::vector<std::vector<uint16_t>> documents) {
  Source s;
  for (auto& d : documents) s.tokens += int64_t(d.size());
  auto samples = std::make_shared<data::PackedDataset>(
      std::move(documents),
      data::PackedOptions{.sequence_length = o.seq_len, .vocab_size = o.vocab_size});
  s.fill = samples->fill();
  s.samples = std::move(samples);
  return s;
}

Source of_files(const Options& o, const std::vector<std::string>& files) {
  const data::TokenOptions options{.sequence_length = o.seq_len, .vocab_size = o.vocab_size};
  if (!o.pack_documents) {
    auto samples = std::make_shared<data::TokenDataset>(files, options);
    return {.samples = samples, .tokens = samples->token_count()};
  }
  std::vector<std::vector<uint16_t>> documents;
  for (auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) fail("cannot read ", file);
    if (std::filesystem::file_size(file) % sizeof(uint16_t))
      fail(file, " was cut short: a token has two bytes, and it has an odd number");
    documents.emplace_back();
    for (uint16_t id; in.read(reinterpret_cast<char*>(&id), sizeof id);) {
      documents.back().push_back(id);
      if (id == o.end_id) documents.emplace_back();
    }
  }
  return packed(o, std::move(documents));
}

Source of_text(const Options& o, const std::string& text, const data::Tokenizer& tokenizer) {
  if (!o.pack_documents) {
    std::shared_ptr<data::TokenDataset> samples;
    try {
      samples = std::make_shared<data::TokenDataset>(
          data::TokenDataset::from_text(text, tokenizer, o.seq_len));
    } catch (const Error& e) {
      fail("--seq_len=", o.seq_len, ", of a text of ", text.size(), " bytes: ", e.what());
    }
    return {.samples = samples,
            .tokens = samples->token_count(),
            .bytes_per_token = samples->bytes_per_token()};
  }
  std::vector<std::vector<uint16_t>> documents;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) documents.push_back(tokenizer.encode(line + "\n"));
  return packed(o, std::move(documents));
}

std::shared_ptr<data::Tokenizer> load_kept(const std::string& path, const Options& o) {
  std::shared_ptr<data::Tokenizer> tokenizer = data::Tokenizer::load(path);
  if (o.tokenizer == "bytes" && tokenizer->name() != "bytes")
    fail("--tokenizer=bytes, and the weights are of ", path);
  // A model may have more words than there are bytes.
  if (tokenizer->name() == "bytes" ? o.vocab_size < 256 : tokenizer->vocab_size() != o.vocab_size)
    fail("--vocab_size=", o.vocab_size, ", and ", path, " has ", tokenizer->vocab_size(),
         " tokens");
  return tokenizer;
}

}  // namespace

void keep_tokenizer(const Corpus& corpus, const std::string& path) {
  if (corpus.tokenizer)
    corpus.tokenizer->save(path);
  else
    fs::remove(path);  // of weights that were here before
}

Corpus load_corpus(const Options& o) {
  Corpus c;
  Source train, validation;
  if (is_of_tokens(o.data)) {
    train = with_flag("--data", o.data, [&] { return of_files(o, o.data); });
    c.description = concat(train.tokens, " tokens of ", o.data.size(),
                           " file(s), without a tokenizer: no sample",
                           o.val_data.empty() ? ", and without --val_data no validation" : "");
  } else {
    for (auto& p : o.data)
      if (p.ends_with(".bin")) fail("--data mixes token files (", p, ") and text: give one kind");
    const std::string text = o.data.empty()
                                 ? data::bible_text()
                                 : with_flag("--data", o.data, [&] { return text_of(o.data); });
    auto [trained, held_out] = data::hold_out(text);
    if (!o.val_data.empty()) trained = text, held_out = {};
    const bool goes_on = o.resume && !dist::checkpoint_steps(o.checkpoint_dir).empty();
    const std::string& weights = goes_on ? o.checkpoint_dir : o.init_from;
    const std::string kept = cli::kept_tokenizer(weights);
    if (!kept.empty()) {
      c.tokenizer = load_kept(kept, o);
    } else if (o.tokenizer == "bytes") {
      if (o.vocab_size < 256)
        fail("--vocab_size=", o.vocab_size, " is smaller than the 256 tokens of --tokenizer=bytes");
      c.tokenizer = std::make_shared<data::ByteTokenizer>();
    } else {
      const std::string path =
          (fs::path(cache_folder()) / concat("tokenizer-", o.vocab_size, ".model")).string();
      try {
        c.tokenizer =
            data::BpeTokenizer::train_or_load(trained, {.vocab_size = o.vocab_size}, path);
      } catch (const Error& e) {
        fail(o.data.empty() ? "the default text" : "--data", " and --vocab_size=", o.vocab_size,
             o.is_vocab_size_given ? "" : concat(", which --preset=", o.preset, " sets"), ": ",
             e.what(), "; give more text, a smaller --vocab_size, or --tokenizer=bytes");
      }
    }
    with_flag("--data", o.data, [&] {
      train = of_text(o, std::string(trained), *c.tokenizer);
      if (!held_out.empty()) validation = of_text(o, std::string(held_out), *c.tokenizer);
    });
    c.description =
        concat(text.size() / 1'000'000.0 < 1 ? concat(text.size() / 1000, " kB")
                                             : concat(text.size() / 1'000'000, " MB"),
               " of text", o.data.empty() ? "" : files_of_text(o.data), ", ", train.tokens,
               " tokens (", c.tokenizer->name(), ", ", c.tokenizer->vocab_size(), " words)");
    if (!weights.empty() && kept.empty() && o.tokenizer != "bytes")
      c.description += concat("; no tokenizer lies with ", weights, ": it is one of this text");
  }
  if (o.pack_documents)
    c.description += concat(", documents packed, ", int(100 * train.fill), "% of places used");
  if (!o.val_data.empty()) {
    if (is_of_tokens(o.val_data))
      validation = with_flag("--val_data", o.val_data, [&] { return of_files(o, o.val_data); });
    else if (c.tokenizer)
      validation = with_flag("--val_data", o.val_data,
                             [&] { return of_text(o, text_of(o.val_data), *c.tokenizer); });
    else
      fail("--val_data is text, but --data are token files: their tokenizer is not known");
  }
  c.train = train.samples, c.validation = validation.samples;
  if (c.tokenizer) c.bytes_per_token = validation.bytes_per_token;
  return c;
}

}  // namespace examples
