// The mean loss over a validation set, each sample once at any number of ranks.
//
//     double loss = validation_loss(*corpus.validation, batch_size, [&](const data::Batch& b) {
//       return nn::call(model, b.at("input_ids"));
//     });
#pragma once
#include <cstdint>
#include <functional>

#include "sherd.h"

namespace examples {

// logits(batch): [B, T, V] of a batch with "labels", int64 [B, T], of which -100 do not count. A
// collective: every rank makes as many forwards.
double validation_loss(const sherd::data::Dataset& samples, int64_t batch_size,
                       const std::function<sherd::Tensor(const sherd::data::Batch& batch)>& logits);

}  // namespace examples
