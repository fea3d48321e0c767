// Damaged files of every kind that Sherd reads: each is read whole or refused by an Error, and
// nothing else happens. Worth most under --config=asan.
//
//     ./bazelw run --config=asan //tests/long:fuzz_files -- SECONDS [SEED]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "distributed/checkpoint/checkpoint_folder.h"
#include "sherd.h"

namespace {

using namespace sherd;
namespace fs = std::filesystem;
using Random = std::mt19937_64;

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// One to three changes: a byte, bytes gone, bytes twice, a number's digit, the end cut off, a bit.
std::string damage(std::string bytes, Random& random) {
  for (int n = 1 + int(random() % 3); n > 0 && !bytes.empty(); --n) {
    const size_t at = random() % bytes.size(), length = 1 + random() % 8;
    switch (random() % 6) {
      case 0:
        bytes[at] = char(random());
        break;
      case 1:
        bytes.erase(at, length);
        break;
      case 2:
        bytes.insert(at, bytes.substr(random() % bytes.size(), length));
        break;
      case 3:
        if (const size_t d = bytes.find_first_of("0123456789", at); d != std::string::npos)
          bytes[d] = char('0' + random() % 10);
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes[at] = char(bytes[at] ^ (1 << random() % 8));
        break;
    }
  }
  return bytes;
}

struct Kind {
  const char* name;
  std::string whole;                             // an undamaged file
  std::function<void(const std::string&)> read;  // the path of a damaged one
  int64_t accepted = 0, refused = 0;
};

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "a damaged file was read, but %s\n", what);
  std::abort();
}

std::vector<Kind> kinds(const std::string& folder) {
  std::vector<Kind> all;
  save_safetensors(folder + "/s", {{"a", arange(6).view({2, 3})}, {"b", zeros({5}, kBFloat16)}},
                   {{"format", "pt"}});
  all.push_back({"safetensors", read_file(folder + "/s"), [](const std::string& path) {
                   const SafetensorsReader file(path);
                   for (const auto& info : file.tensors())
                     require(file.read(info.name).nbytes() == info.bytes, "a size is wrong");
                 }});

  std::vector<uint16_t> tokens(200);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = uint16_t(i % 97);
  data::write_tokens(folder + "/t", tokens);
  all.push_back({"tokens", read_file(folder + "/t"), [](const std::string& path) {
                   const data::TokenDataset dataset({path},
                                                    {.sequence_length = 7, .vocab_size = 97});
                   for (int64_t i = 0; i < dataset.size(); ++i) {
                     const data::Sample s = dataset.get(i);
                     for (const auto& [name, t] : s)
                       for (int64_t k = 0; k < t.numel(); ++k)
                         require(t.data<int64_t>()[k] < 97, "a token is not below vocab_size");
                   }
                 }});

  std::string text;
  for (int i = 0; i < 300; ++i) text += concat("a line of text, number ", i * 7919 % 1000, "\n");
  data::BpeTokenizer::train(text, {.vocab_size = 300})->save(folder + "/b");
  all.push_back({"tokenizer", read_file(folder + "/b"), [text](const std::string& path) {
                   const auto tokenizer = data::Tokenizer::load(path);
                   const std::string some = text.substr(0, 200);
                   require(tokenizer->decode(tokenizer->encode(some)) == some, "loses text");
                 }});

  // The state of a checkpoint, beside a file that it names.
  {
    dist::CheckpointWriter writer(folder + "/c", 1);
    write(writer.path("model.safetensors"), all[0].whole);
    writer.add("model.safetensors", summarize_file(writer.path("model.safetensors")));
    writer.commit({{"lr", 0.1}, {"names", {"a", "b"}}});
  }
  const std::string checkpoint = folder + "/c/" + dist::checkpoint_name(1);
  all.push_back(
      {"checkpoint", read_file(checkpoint + "/state.json"), [checkpoint](const std::string& path) {
         fs::copy_file(path, checkpoint + "/state.json", fs::copy_options::overwrite_existing);
         dist::open_checkpoint(checkpoint);
       }});
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  if (seconds <= 0 || argc > 3) {
    std::fprintf(stderr, "usage: fuzz_files SECONDS [SEED]\n");
    return 2;
  }
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  std::fflush(stdout);
  std::string folder = (fs::temp_directory_path() / "fuzz_files_XXXXXX").string();
  if (!mkdtemp(folder.data())) return 1;
  Random random(seed);
  std::vector<Kind> all = kinds(folder);
  const auto start = std::chrono::steady_clock::now();
  int64_t total = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds)
    for (Kind& kind : all) {
      write(folder + "/damaged", damage(kind.whole, random));
      try {
        kind.read(folder + "/damaged");
        ++kind.accepted;
      } catch (const Error&) {
        ++kind.refused;
      }
      ++total;
    }
  fs::remove_all(folder);
  bool good = true;
  for (const Kind& kind : all) {
    std::printf("%s: %ld read, %ld refused\n", kind.name, long(kind.accepted), long(kind.refused));
    good = good && kind.refused > 0;
  }
  std::printf("%ld damaged files, each read or refused\n", long(total));
  return good ? 0 : 1;
}
