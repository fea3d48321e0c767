// A check at construction that all ranks hold the same model: ranks that differ fail at once, and
// name the difference.
#pragma once
#include <string>
#include <vector>

#include "distributed/process_group.h"

namespace sherd::dist {

// `lines` describe the model, one parameter or option a line. Error on every rank at the first line
// that differs, naming both ranks and both lines. A collective: one small exchange where all agree.
void verify_equal_on_all_ranks(const char* what, const Group& group,
                               const std::vector<std::string>& lines);

}  // namespace sherd::dist
