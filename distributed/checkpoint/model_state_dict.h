// A model's whole state in rank 0's memory, and back, whatever the strategy: under the names of
// torch.distributed.checkpoint.state_dict.
//
//     nn::StateDict all = dist::get_model_state_dict(model);      // on rank 0; elsewhere empty
//     dist::set_model_state_dict(model, all);                     // rank 0's, to all ranks
//
// Collectives. A parameter travels at a time, so no other rank ever holds the whole.
#pragma once
#include "distributed/checkpoint/full_state.h"
#include "nn/state_dict.h"

namespace sherd::dist {

// Parameters, tied ones under each name, and persistent buffers, in master dtypes, by the names of
// the unwrapped model. Copies.
nn::StateDict get_model_state_dict(const ModelState& model);

// Rank 0's `state` counts. One Error on all ranks, before anything is changed, lists all names that
// are missing, unexpected or misshapen. Not strict: missing and unexpected names are returned, on
// all ranks, and what is missing stays as it is.
nn::LoadResult set_model_state_dict(const ModelState& model, const nn::StateDict& state,
                                    bool strict = true);

}  // namespace sherd::dist
