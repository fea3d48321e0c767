// What a process says when it is ended by a signal (SIGINT, SIGTERM), on stderr.
//
//     set_last_words("the last checkpoint is run/step-000200");     // and again after the next one
#pragma once
#include <string>

namespace examples {

// Replaces what was set before. Cut to some thousand bytes.
void set_last_words(const std::string& line);

}  // namespace examples
