// Sampling text from a language model, token by token.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "sherd.h"

namespace examples {

struct GenerateOptions {
  int64_t max_new_tokens = 100;
  int64_t context = 128;     // tokens that the model sees at most
  double temperature = 0.8;  // 0: the likeliest token
  int64_t top_k = 40;        // 0: all
  int64_t vocab_size = 0;    // tokens that exist, where the model has more; 0: all it has
  uint64_t seed = 0;
};

// logits(ids): int64 [1, T] -> [1, T, V]. With a sharded model every rank makes the same calls, and
// gets the same tokens.
std::vector<uint16_t> generate(const std::function<sherd::Tensor(const sherd::Tensor&)>& logits,
                               std::vector<uint16_t> prompt, const GenerateOptions& options);

}  // namespace examples
