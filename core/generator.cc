#include "core/generator.h"

#include <string>

#include "core/context.h"
#include "core/philox.h"

namespace sherd {

Generator::Draw Generator::next() {
  const std::string name = "stream " + std::to_string(state_.stream);
  return {philox_key(state_.seed, name.data(), name.size()), state_.draws++};
}

Generator& default_generator() { return Context::current().generator(); }
void manual_seed(uint64_t seed) { default_generator().seed(seed); }

}  // namespace sherd
