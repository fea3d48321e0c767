// From flags to what the library is given.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "examples/support/corpus.h"
#include "examples/support/options.h"
#include "sherd.h"

namespace examples {

// All ranks' corpus: rank 0 trains the tokenizer, the others find it in the cache. A collective.
// Throws UsageError.
Corpus load_on_every_rank(const Options& options);

// How --strategy, --precision and their like are said to FSDP; `blocks`: units, unless
// --wrap_min_params says otherwise. A collective. Throws UsageError.
sherd::FsdpOptions fsdp_options(const Options& options, const sherd::WrapPolicy& blocks);

std::unique_ptr<sherd::optim::LRScheduler> make_schedule(const Options& options,
                                                         sherd::optim::Optimizer& optimizer);

// Where fp16's scaler is; kept in checkpoints.
nlohmann::json to_json(const sherd::ShardedGradScaler& scaler);
void load(sherd::ShardedGradScaler& scaler, const nlohmann::json& saved);

// What a run is, for its log and its checkpoints. Null: without that wrapper.
nlohmann::json describe_run(const Options& options, const sherd::nn::Module& model,
                            const sherd::FsdpModule* fsdp, const sherd::dist::DdpReducer* ddp);

}  // namespace examples
