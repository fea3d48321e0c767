#include "data/sampler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "core/error.h"

namespace sherd::data {
namespace {

// PyTorch's CPU generator: a Mersenne twister that takes the low half of its seed.
class TorchGenerator {
 public:
  explicit TorchGenerator(uint64_t seed) : engine_(uint32_t(seed)) {}

  int64_t below(int64_t n) { return int64_t(engine_() % uint64_t(n)); }
  int64_t below_wide(int64_t n) {
    const uint64_t high = engine_();
    return int64_t((high << 32 | engine_()) % uint64_t(n));
  }

  std::vector<int64_t> permutation(int64_t n) {
    std::vector<int64_t> order(static_cast<size_t>(n));
    if (n < int64_t(std::numeric_limits<uint32_t>::max() / 20)) {
      std::iota(order.begin(), order.end(), 0);
      for (int64_t i = 0; i < n - 1; ++i)
        std::swap(order[size_t(i)], order[size_t(i + below(n - i))]);
      return order;
    }
    // From here on one word's remainder would be biased: two words a draw, and, in PyTorch, the
    // inside-out form of the shuffle.
    for (int64_t i = 0; i < n; ++i) {
      const int64_t z = below_wide(i + 1);
      order[size_t(i)] = order[size_t(z)];
      order[size_t(z)] = i;
    }
    return order;
  }

 private:
  std::mt19937 engine_;
};

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }  // a not negative

int64_t checked_size(const char* who, int64_t size) {
  if (size < 0) fail("[", who, "] size must not be negative, got ", size);
  return size;
}

}  // namespace

std::vector<int64_t> random_permutation(int64_t n, uint64_t seed) {
  return TorchGenerator(seed).permutation(checked_size("random_permutation", n));
}

void EpochCounter::set_epoch(int64_t epoch) {
  if (epoch < 0) fail("[set_epoch] epoch must not be negative, got ", epoch);
  if (epoch != epoch_) start_ = 0;
  epoch_ = epoch;
  ++times_set_;
}

void EpochCounter::check_start(int64_t samples) const {
  if (samples < 0) fail("[set_start] got ", samples, " samples, should be 0 at least");
  if (samples > 0 && !can_start())
    fail("[set_start] this sampler cannot begin in the middle of an epoch");
}

void EpochCounter::set_start(int64_t samples) {
  check_start(samples);
  start_ = samples;
}

void EpochCounter::load_state_dict(const SamplerState& state) {
  check_start(state.start);
  set_epoch(state.epoch);
  set_start(state.start);
}

SequentialSampler::SequentialSampler(int64_t size)
    : size_(checked_size("SequentialSampler", size)) {}

std::vector<int64_t> SequentialSampler::indices() const {
  std::vector<int64_t> order(static_cast<size_t>(size()));
  std::iota(order.begin(), order.end(), start());
  return order;
}

RandomSampler::RandomSampler(int64_t size, const RandomOptions& options)
    : size_(checked_size("RandomSampler", size)),
      num_samples_(options.num_samples < 0 ? size : options.num_samples),
      options_(options) {
  if (options.num_samples < -1)
    fail("[RandomSampler] num_samples must not be negative, got ", options.num_samples);
  if (size == 0 && num_samples_ > 0)
    fail("[RandomSampler] cannot draw ", num_samples_, " samples from an empty dataset");
}

std::vector<int64_t> RandomSampler::indices() const {
  TorchGenerator generator(options_.seed + uint64_t(epoch()));
  std::vector<int64_t> order;
  order.reserve(size_t(num_samples_));
  const bool wide = size_ >= int64_t(1) << 28;  // as in torch.randint
  if (options_.replacement)
    for (int64_t i = 0; i < num_samples_; ++i)
      order.push_back(wide ? generator.below_wide(size_) : generator.below(size_));
  while (int64_t(order.size()) < num_samples_) {
    const auto permutation = generator.permutation(size_);
    const int64_t rest = num_samples_ - int64_t(order.size());
    order.insert(order.end(), permutation.begin(), permutation.begin() + std::min(rest, size_));
  }
  order.erase(order.begin(), order.end() - size());
  return order;
}

DistributedSampler::DistributedSampler(int64_t size, const DistributedOptions& options)
    : size_(checked_size("DistributedSampler", size)), options_(options) {
  if (options.num_replicas < 1)
    fail("[DistributedSampler] num_replicas must be the number of ranks, at least 1, got ",
         options.num_replicas);
  if (options.rank < 0 || options.rank >= options.num_replicas)
    fail("[DistributedSampler] rank ", options.rank, " is out of range: of ", options.num_replicas,
         " replicas, ranks are 0…", options.num_replicas - 1);
  if (options.drop_last && options.uneven)
    fail("[DistributedSampler] drop_last and uneven exclude each other");
}

int64_t DistributedSampler::size() const {
  const int64_t rest = std::max<int64_t>(size_ - start(), 0), w = options_.num_replicas;
  if (options_.uneven) return ceil_div(std::max<int64_t>(rest - options_.rank, 0), w);
  return options_.drop_last ? rest / w : ceil_div(rest, w);
}

std::vector<int64_t> DistributedSampler::indices() const {
  const auto order =
      options_.shuffle ? random_permutation(size_, options_.seed + uint64_t(epoch())) : [&] {
        std::vector<int64_t> all(static_cast<size_t>(size_));
        std::iota(all.begin(), all.end(), 0);
        return all;
      }();
  std::vector<int64_t> own(static_cast<size_t>(size()));
  for (int64_t i = 0; i < int64_t(own.size()); ++i)
    own[size_t(i)] = order[size_t((start() + options_.rank + i * options_.num_replicas) % size_)];
  return own;
}

BatchSampler::BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last)
    : sampler_(&sampler), batch_size_(batch_size), drop_last_(drop_last) {
  if (batch_size < 1) fail("[BatchSampler] batch_size must be at least 1, got ", batch_size);
}

int64_t BatchSampler::size() const {
  if (!sampler_) return int64_t(list_.size());
  return drop_last_ ? sampler_->size() / batch_size_ : ceil_div(sampler_->size(), batch_size_);
}

std::vector<std::vector<int64_t>> BatchSampler::batches() const {
  if (!sampler_) return list_;
  const auto indices = sampler_->indices();
  std::vector<std::vector<int64_t>> batches;
  for (size_t begin = 0; begin < indices.size(); begin += size_t(batch_size_)) {
    const size_t end = std::min(begin + size_t(batch_size_), indices.size());
    if (drop_last_ && int64_t(end - begin) < batch_size_) break;
    batches.emplace_back(indices.begin() + int64_t(begin), indices.begin() + int64_t(end));
  }
  return batches;
}

void BatchSampler::set_epoch(int64_t epoch) {
  sampler_ ? sampler_->set_epoch(epoch) : EpochCounter::set_epoch(epoch);
}
int64_t BatchSampler::epoch() const { return sampler_ ? sampler_->epoch() : EpochCounter::epoch(); }
int64_t BatchSampler::times_set() const {
  return sampler_ ? sampler_->times_set() : EpochCounter::times_set();
}
int64_t BatchSampler::rank() const { return sampler_ ? sampler_->rank() : EpochCounter::rank(); }
int64_t BatchSampler::num_replicas() const {
  return sampler_ ? sampler_->num_replicas() : EpochCounter::num_replicas();
}
int64_t BatchSampler::start() const { return sampler_ ? sampler_->start() : EpochCounter::start(); }
void BatchSampler::set_start(int64_t samples) {
  sampler_ ? sampler_->set_start(samples) : EpochCounter::set_start(samples);
}

}  // namespace sherd::data
