// Generator: the random state of a context. Each random op takes one draw, a (key, position) pair
// from which Philox makes as many numbers as the op needs; so the numbers depend on (seed, stream,
// number of the draw) alone, and a recomputation that restores the state draws the same again.
// `stream` tells ranks and workers apart.
#pragma once
#include <cstdint>

namespace sherd {

class Generator {
 public:
  struct State {
    uint64_t seed = 0;
    uint64_t stream = 0;
    uint64_t draws = 0;
    bool operator==(const State&) const = default;
  };
  struct Draw {
    uint64_t key;     // Philox key
    uint64_t number;  // high half of the Philox counter; the low half counts blocks of four words
  };

  void seed(uint64_t seed, uint64_t stream = 0) { state_ = {seed, stream, 0}; }
  Draw next();
  const State& state() const { return state_; }
  void set_state(const State& s) { state_ = s; }

 private:
  State state_;
};

// This thread's innermost GeneratorGuard's, else the current context's.
Generator& default_generator();
void manual_seed(uint64_t seed);

// For the scope, this thread draws from `generator`: a loader's worker gives each sample its own.
class GeneratorGuard {
 public:
  explicit GeneratorGuard(Generator& generator);
  ~GeneratorGuard();
  GeneratorGuard(const GeneratorGuard&) = delete;
  GeneratorGuard& operator=(const GeneratorGuard&) = delete;

 private:
  Generator* before_;
};

}  // namespace sherd
