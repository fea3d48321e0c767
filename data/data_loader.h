// DataLoader: batches of a Dataset, in a sampler's order, made ahead by worker threads.
//
//     data::DataLoader loader(dataset, {.batch_size = 8, .shuffle = true, .num_workers = 2});
//     for (int64_t epoch = 0; epoch < epochs; ++epoch)
//       for (auto& batch : loader) train(batch.at("input_ids"), batch.at("labels"));
//
// One loop is one epoch. Order and content of batches do not depend on the number of workers. Where
// nobody called set_epoch between two loops, the second is the next epoch.
//
// Errors. What Dataset::get throws comes out of the loop at that batch, as an Error that says
// "sample 17: …" and nests the original (std::rethrow_if_nested). A loop by hand may go on:
//
//     for (auto it = loader.begin(); it != loader.end(); ++it) {
//       try { train(*it); } catch (const Error& e) { ... }          // one error a broken batch
//     }
//
// Resuming. state_dict() says how far the loop is: batches that were made ahead but not yet handed
// out do not count. A loader that is given it by load_state_dict() goes on with the next batch:
// with as many ranks and samples a batch, the run is the one that was not interrupted. With others,
// what is left of the epoch is what nobody had yet, each sample once, in the same order.
#pragma once
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

#include "data/dataset.h"
#include "data/sampler.h"

namespace sherd::data {

// What a worker is told, and may ask for inside Dataset::get.
struct WorkerInfo {
  int64_t id = 0;  // 0 … num_workers - 1; batch b of an epoch is made by worker b % num_workers
  int64_t num_workers = 0;
  int64_t epoch = 0;
  uint64_t seed = 0;  // differs by (loader's seed, epoch, rank, id)
};
// Of the worker that this thread is; none in other threads, so none with num_workers = 0.
const WorkerInfo* worker_info();

// The names and the order of PyTorch's arguments.
struct LoaderOptions {
  std::optional<int64_t> batch_size = 1;  // nullopt: samples as they are, one by one
  bool shuffle = false;                   // a RandomSampler of `seed`
  Sampler* sampler = nullptr;             // not with shuffle; must live as long as the loader
  BatchSampler* batch_sampler = nullptr;  // instead of batch_size, shuffle, sampler and drop_last
  int64_t num_workers = 0;                // threads, at most 4096; 0: batches are made in the loop
  CollateFn collate_fn = {};              // default: stack_samples
  bool pin_memory = false;                // page-locked, for copies to CUDA; no effect without it
  bool drop_last = false;                 // leave out the last batch if it is not full
  double timeout = 600;  // seconds to wait for a worker's batch; 0: for ever. See Iterator
  std::function<void(const WorkerInfo&)> worker_init_fn =
      {};                             // in each worker, before its first batch
  int64_t prefetch_factor = 2;        // batches made ahead a worker, at most 10000
  std::optional<uint64_t> seed = {};  // default: that of default_generator() at construction
};

// A position in the run of batches, for checkpoints. `batches` of the epoch are done.
struct LoaderState {
  int64_t epoch = 0;
  int64_t batches = 0;
  int64_t batches_per_epoch = 0;
  uint64_t seed = 0;
  int64_t start = 0;         // samples, over all ranks, that were left out before the first batch
  int64_t global_batch = 0;  // samples a batch, over all ranks; 0: batches come from a list
  int64_t dataset_size = 0;
  uint64_t dataset_fingerprint = 0;  // see Dataset; 0: not known
  bool operator==(const LoaderState&) const = default;
};

class DataLoader {
 public:
  class Iterator;

  // `dataset` must live as long as the loader. Error where options exclude each other or are out of
  // range. Options can't be changed later.
  explicit DataLoader(const Dataset& dataset, LoaderOptions options = {});
  explicit DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options = {});
  DataLoader(const Dataset&& temporary, LoaderOptions options = {}) = delete;
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Begins an epoch (or goes on with one, after load_state) and starts its workers, which work in
  // this thread's context. A loop over this loader that still runs is ended: one at a time.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  int64_t size() const;           // batches an epoch, on this rank
  void set_epoch(int64_t epoch);  // of the next loop; the sampler's
  uint64_t seed() const;

  // Inside the loop's body, the batch that the body has counts as done.
  LoaderState state_dict() const;
  // The next loop begins after state.batches of state.epoch; if those are all, that loop is empty.
  // set_epoch with another epoch drops it. Error if the dataset has another size or fingerprint, or
  // if batches of another size or number of ranks come from a sampler that cannot begin in the
  // middle.
  void load_state_dict(const LoaderState& state);

 private:
  class Run;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// An input iterator: copies share one position. When the last copy goes (the loop ended, or was
// left), the workers are stopped: between two samples, so that this takes as long as one get() at
// most. One that is still inside get() after 5 seconds is left behind with a line on stderr; the
// dataset must then stay alive until the program ends.
class DataLoader::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  // Waits until the batch is there, or throws the error in its place. Error that names worker,
  // sample and seconds if it does not come within `timeout`; that ends the loop.
  Batch& operator*() const;
  Batch* operator->() const { return &**this; }
  Iterator& operator++();
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const;

 private:
  friend class DataLoader;
  explicit Iterator(std::shared_ptr<Run> run) : run_(std::move(run)) {}
  std::shared_ptr<Run> run_;
};

}  // namespace sherd::data
