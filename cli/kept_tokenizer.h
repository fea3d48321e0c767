// Where the tokenizer of weights lies, for with another one they would be worth nothing: beside the
// checkpoints of a run's folder, and beside a file of weights.
//
//     tokenizer_of_run("run")                     // run/tokenizer.model
//     tokenizer_of_weights("w.safetensors")       // w.tokenizer.model
//     kept_tokenizer("run/step-000100")           // run/tokenizer.model, if it is there
//     auto tokenizer = tokenizer_to_carry("run/step-000100", place);    // and, after its weights,
//     if (tokenizer) tokenizer->save(place);
#pragma once
#include <memory>
#include <string>

#include "data/tokenizer.h"

namespace sherd::cli {

std::string tokenizer_of_run(const std::string& folder);
std::string tokenizer_of_weights(const std::string& file);  // where a link leads

// That of a run, of one of its steps or of a file of weights; empty: none was kept.
std::string kept_tokenizer(const std::string& weights);

// Error if a file of this path is not one that a tokenizer's save() wrote.
void need_tokenizer_place(const std::string& whose, const std::string& path);
// The tokenizer of these weights, for others that are made of them and have `path` as its place;
// null: they have none. Error if there is something else already that would stay, or be lost.
std::shared_ptr<data::Tokenizer> tokenizer_to_carry(const std::string& weights,
                                                    const std::string& path);

}  // namespace sherd::cli
