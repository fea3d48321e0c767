// Objects: strings, or JSON values (numbers, strings, lists, maps, nested), of any size on each
// rank. Names and meanings are those of torch.distributed; each returns when the objects are there.
// For the rare exchange: names, options, results of an evaluation.
//
//     std::vector<nlohmann::json> all(dist::world_size());
//     dist::all_gather_object(all, {{"rank", dist::rank()}, {"samples", seen}});
//     std::vector<std::string> names(3);                       // filled on rank 0
//     dist::broadcast_object_list(names, 0);                   // as many elements on all ranks
//
// Each is two collectives, of sizes and of bytes; JSON travels as CBOR. Ranks in arguments are
// ranks in the group. Error, before anything is sent: a list of the wrong length ("got, should
// be"), options.async.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "distributed/distributed.h"

namespace sherd::dist {

// objects: one element a rank.
void all_gather_object(std::vector<std::string>& objects, const std::string& object,
                       const CallOptions& options = {});
void all_gather_object(std::vector<nlohmann::json>& objects, const nlohmann::json& object,
                       const CallOptions& options = {});
// objects: one element a rank on the root, none elsewhere.
void gather_object(const std::string& object, std::vector<std::string>& objects, int root = 0,
                   const CallOptions& options = {});
void gather_object(const nlohmann::json& object, std::vector<nlohmann::json>& objects, int root = 0,
                   const CallOptions& options = {});
// As many elements on all ranks, one at least; afterwards the root's.
void broadcast_object_list(std::vector<std::string>& objects, int root = 0,
                           const CallOptions& options = {});
void broadcast_object_list(std::vector<nlohmann::json>& objects, int root = 0,
                           const CallOptions& options = {});
// inputs: one element a rank on the root, none elsewhere. output[0] becomes this rank's; it has one
// element at least.
void scatter_object_list(std::vector<std::string>& output, const std::vector<std::string>& inputs,
                         int root = 0, const CallOptions& options = {});
void scatter_object_list(std::vector<nlohmann::json>& output,
                         const std::vector<nlohmann::json>& inputs, int root = 0,
                         const CallOptions& options = {});

}  // namespace sherd::dist
