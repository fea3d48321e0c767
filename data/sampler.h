// Samplers: which samples an epoch has, in which order; and, for batch samplers, how they are cut
// into batches.
//
//     data::DistributedSampler sampler(dataset.size(), {.num_replicas = dist::world_size(),
//                                                       .rank = dist::rank()});
//     data::DataLoader loader(dataset, {.batch_size = 8, .sampler = &sampler});
//     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//       sampler.set_epoch(epoch);          // left out, the loader goes to the next epoch by itself
//       for (auto& batch : loader) ...
//     }
//
// Orders are PyTorch's, index for index: a shuffled epoch is torch.randperm with a CPU generator of
// seed + epoch, which is what torch's DistributedSampler does. A sampler of your own derives from
// Sampler and says size() and indices().
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace sherd::data {

struct SamplerState {
  int64_t epoch = 0;
  int64_t start = 0;  // see EpochCounter::start
  bool operator==(const SamplerState&) const = default;
};

// The number of the epoch, which samplers of all kinds have.
class EpochCounter {
 public:
  virtual ~EpochCounter() = default;
  virtual void set_epoch(int64_t epoch);  // at least 0; of the next indices() or batches()
  virtual int64_t epoch() const { return epoch_; }
  // How often set_epoch was called: so a loader sees whether somebody did.
  virtual int64_t times_set() const { return times_set_; }
  virtual int64_t rank() const { return 0; }  // a worker's seed depends on it
  virtual int64_t num_replicas() const { return 1; }
  // So many samples, over all ranks, are left out at the beginning of this epoch: with it a run
  // goes on at another number of ranks or batch size. Another epoch makes it 0. Error if the order
  // does not allow it: that of a fixed list, or of a class that does not say can_start().
  virtual int64_t start() const { return start_; }
  virtual void set_start(int64_t samples);
  virtual bool can_start() const { return false; }
  // For loops without a DataLoader, whose own state has this one's: `start` is then for the loop to
  // set, to the samples of this epoch that all ranks together have had.
  SamplerState state_dict() const { return {epoch(), start()}; }
  void load_state_dict(const SamplerState& state);

 private:
  void check_start(int64_t samples) const;

  int64_t epoch_ = 0, times_set_ = 0, start_ = 0;
};

class Sampler : public EpochCounter {
 public:
  virtual int64_t size() const = 0;                  // number of indices an epoch, on this rank
  virtual std::vector<int64_t> indices() const = 0;  // of this epoch
};

// 0, 1, … size - 1.
class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(int64_t size);
  int64_t size() const override { return std::max<int64_t>(size_ - start(), 0); }
  std::vector<int64_t> indices() const override;
  bool can_start() const override { return true; }

 private:
  int64_t size_;
};

// The given indices, in the same order every epoch.
class ListSampler : public Sampler {
 public:
  explicit ListSampler(std::vector<int64_t> indices) : indices_(std::move(indices)) {}
  int64_t size() const override { return int64_t(indices_.size()); }
  std::vector<int64_t> indices() const override { return indices_; }

 private:
  std::vector<int64_t> indices_;
};

struct RandomOptions {
  bool replacement = false;  // draw each index from all, so some come often and some never
  int64_t num_samples = -1;  // an epoch; -1: the dataset's size. Beyond it, without replacement:
                             // one permutation after another
  uint64_t seed = 0;
};

class RandomSampler : public Sampler {
 public:
  explicit RandomSampler(int64_t size, const RandomOptions& options = {});
  int64_t size() const override { return std::max<int64_t>(num_samples_ - start(), 0); }
  std::vector<int64_t> indices() const override;
  bool can_start() const override { return true; }

 private:
  int64_t size_, num_samples_;
  RandomOptions options_;
};

struct DistributedOptions {
  int64_t num_replicas = 0;  // dist::world_size(); must be given
  int64_t rank = 0;          // dist::rank()
  bool shuffle = true;
  uint64_t seed = 0;  // the same on all ranks
  // Where num_replicas does not divide the size: by default the first samples are repeated, so that
  // all ranks have as many. drop_last leaves the last ones out instead; `uneven` does neither, so
  // each sample is seen once and the first ranks may have one more than the others (for an exact
  // evaluation whose collectives do not depend on the number of batches).
  bool drop_last = false;
  bool uneven = false;
};

// Every num_replicas-th of the (shuffled) indices, from rank on. The dataset may be smaller than
// num_replicas: padding repeats it as often as needed.
class DistributedSampler : public Sampler {
 public:
  DistributedSampler(int64_t size, const DistributedOptions& options);
  int64_t size() const override;
  int64_t rank() const override { return options_.rank; }
  int64_t num_replicas() const override { return options_.num_replicas; }
  std::vector<int64_t> indices() const override;
  bool can_start() const override { return true; }

 private:
  int64_t size_;
  DistributedOptions options_;
};

// Batches of a sampler's indices, batch_size at a time; or a fixed list of batches.
class BatchSampler : public EpochCounter {
 public:
  // The last batch may be smaller, or is left out with drop_last. `sampler` must live as long.
  BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last = false);
  explicit BatchSampler(std::vector<std::vector<int64_t>> batches) : list_(std::move(batches)) {}

  virtual int64_t size() const;  // number of batches an epoch
  virtual std::vector<std::vector<int64_t>> batches() const;

  // Of the sampler, where there is one.
  void set_epoch(int64_t epoch) override;
  int64_t epoch() const override;
  int64_t times_set() const override;
  int64_t rank() const override;
  int64_t num_replicas() const override;
  int64_t start() const override;
  void set_start(int64_t samples) override;
  bool can_start() const override { return sampler_ && sampler_->can_start(); }
  // Samples a batch, over all ranks; 0: batches are a list, or made by a class of its own.
  int64_t global_batch() const { return sampler_ ? batch_size_ * num_replicas() : 0; }

 protected:
  BatchSampler() = default;  // for those that say size() and batches() themselves

 private:
  Sampler* sampler_ = nullptr;
  int64_t batch_size_ = 0;
  bool drop_last_ = false;
  std::vector<std::vector<int64_t>> list_;
};

// A permutation of 0 … n - 1: torch.randperm(n, generator=torch.Generator().manual_seed(seed)).
std::vector<int64_t> random_permutation(int64_t n, uint64_t seed);

}  // namespace sherd::data
