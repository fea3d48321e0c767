#include "distributed/collective_hints.h"

#include <string_view>

namespace sherd::dist {

std::string hint_of(const CollectiveTag& tag) {
  const std::string_view label = tag.label;
  if (label.starts_with("ddp "))
    return ". Ranks that train a DDP model need equal numbers of batches, or ddp.join() around "
           "their loops (docs/ddp.md)";
  if (label.starts_with("gather unit ") || label.starts_with("reduce unit "))
    return ". All ranks must call a sharded model, also to evaluate it, and equally often; for "
           "uneven numbers of batches there is Join (docs/ddp.md)";
  return "";
}

}  // namespace sherd::dist
