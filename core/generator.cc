#include "core/generator.h"

#include <string>

#include "core/context.h"
#include "core/philox.h"

namespace sherd {
namespace {
thread_local Generator* thread_generator = nullptr;
}  // namespace

Generator::Draw Generator::next() {
  const std::string name = "stream " + std::to_string(state_.stream);
  return {philox_key(state_.seed, name.data(), name.size()), state_.draws++};
}

Generator& default_generator() {
  return thread_generator ? *thread_generator : Context::current().generator();
}
void manual_seed(uint64_t seed) { default_generator().seed(seed); }

GeneratorGuard::GeneratorGuard(Generator& generator) : before_(thread_generator) {
  thread_generator = &generator;
}
GeneratorGuard::~GeneratorGuard() { thread_generator = before_; }

}  // namespace sherd
