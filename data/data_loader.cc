#include "data/data_loader.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/context.h"
#include "core/generator.h"
#include "core/philox.h"

namespace sherd::data {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{5};  // with workers that do not leave get()
constexpr int64_t kAllSamples = std::numeric_limits<int64_t>::max() / 2;
constexpr int64_t kMostWorkers = 4096, kMostPrefetched = 10'000;
constexpr double kLongestTimeout = 1e8;  // seconds; beyond it the clock's own type is too small

thread_local const WorkerInfo* this_worker = nullptr;

uint64_t key(uint64_t seed, const std::string& text) {
  return philox_key(seed, text.data(), text.size());
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", seconds);
  return text;
}

// Throws an Error of `where` and the text of the exception in flight, which it nests.
[[noreturn]] void rethrow_from(const std::string& where) {
  std::string what = "an exception that is no std::exception";
  try {
    throw;
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
  }
  std::throw_with_nested(Error(concat("[DataLoader] ", where, ": ", what)));
}

struct Made {
  Batch batch;
  std::exception_ptr error;
};

// What the loop and the workers of one epoch share. Workers keep it alive, in case one of them has
// to be left behind.
struct Job {
  std::shared_ptr<const Dataset> dataset;
  CollateFn collate_fn;  // none: a batch is one sample, as it is
  std::function<void(const WorkerInfo&)> worker_init_fn;
  std::vector<std::vector<int64_t>> batches;
  uint64_t seed = 0;
  int64_t epoch = 0, rank = 0, num_workers = 0, first = 0;
  Context* context = nullptr;

  struct Slot {
    bool ready = false;
    Made made;
  };
  struct Worker {
    bool finished = false;
    std::exception_ptr error;  // of worker_init_fn
    int64_t sample = -1;       // that it is inside of
    Clock::time_point since;   // when it entered
  };

  std::mutex mutex;  // of all below
  std::condition_variable changed;
  bool stop = false;
  int64_t position = 0;     // the batch that the loop takes next
  std::vector<Slot> slots;  // batch b is put into slot b % size, once position > b - size
  std::vector<Worker> workers;
};

// [Note: augmentation seeds] Before each get() the thread's generator is set from (seed, epoch,
// index) alone: so the numbers drawn do not depend on which worker, or whether any, makes the
// sample, nor on the rank, the batch or a resume; and no two samples of an epoch get the same.
Made make(Job& job, int64_t number, const std::function<bool(int64_t sample)>& enter) {
  Made made;
  try {
    Generator generator;
    GeneratorGuard guard(generator);
    const auto& indices = job.batches[size_t(number)];
    const uint64_t sample_key = key(job.seed, concat("epoch ", job.epoch));
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      if (!enter(index)) return made;
      if (index < 0 || index >= job.dataset->size())
        fail("[DataLoader] the sampler asked for sample ", index, " of a dataset of ",
             job.dataset->size(), ": was it made for another one?");
      generator.seed(sample_key, uint64_t(index));
      try {
        samples.push_back(job.dataset->get(index));
      } catch (...) {
        rethrow_from(concat("sample ", index));
      }
    }
    if (!job.collate_fn) {
      made.batch = std::move(samples.at(0));
      return made;
    }
    generator.seed(key(job.seed, concat("collate, epoch ", job.epoch)), uint64_t(number));
    try {
      made.batch = job.collate_fn(samples, indices);
    } catch (...) {
      rethrow_from(concat("batch ", number));
    }
  } catch (...) {
    made.error = std::current_exception();
  }
  return made;
}

void work(const std::shared_ptr<Job>& shared, int64_t id) {
  Job& job = *shared;
  const WorkerInfo info{
      id, job.num_workers, job.epoch,
      key(job.seed, concat("worker ", id, ", rank ", job.rank, ", epoch ", job.epoch))};
  this_worker = &info;
  ContextGuard context(*job.context);
  auto& self = job.workers[size_t(id)];
  const auto finish = [&](std::exception_ptr error) {
    std::lock_guard lock(job.mutex);
    self.error = std::move(error);
    self.finished = true;
    job.changed.notify_all();
  };
  try {
    if (job.worker_init_fn) job.worker_init_fn(info);
  } catch (...) {
    try {
      rethrow_from(concat("worker ", id, ", worker_init_fn"));
    } catch (...) {
      return finish(std::current_exception());
    }
  }
  const int64_t n = job.num_workers, capacity = int64_t(job.slots.size());
  for (int64_t b = job.first + (id - job.first % n + n) % n; b < int64_t(job.batches.size());
       b += n) {
    {
      std::unique_lock lock(job.mutex);
      job.changed.wait(lock, [&] { return job.stop || b < job.position + capacity; });
      if (job.stop) break;
    }
    Made made = make(job, b, [&](int64_t sample) {
      std::lock_guard lock(job.mutex);
      self.sample = sample;
      self.since = Clock::now();
      return !job.stop;
    });
    std::lock_guard lock(job.mutex);
    if (job.stop) break;
    job.slots[size_t(b % capacity)] = {true, std::move(made)};
    job.changed.notify_all();
  }
  finish(nullptr);
}

}  // namespace

const WorkerInfo* worker_info() { return this_worker; }

// One epoch's loop: the side of the one who takes the batches.
class DataLoader::Run {
 public:
  Run(std::shared_ptr<Job> job, double timeout, std::shared_ptr<LoaderState> progress)
      : job_(std::move(job)), timeout_(timeout), progress_(std::move(progress)) {
    const size_t count = job_->workers.size();
    try {
      for (size_t id = 0; id < count; ++id)
        threads_.emplace_back([job = job_, id] { work(job, int64_t(id)); });
    } catch (const std::system_error& error) {
      {
        std::lock_guard lock(job_->mutex);
        for (size_t id = threads_.size(); id < count; ++id) job_->workers[id].finished = true;
      }
      const size_t started = threads_.size();
      stop_workers();
      fail("[DataLoader] the system refused a thread for worker ", started, " of ", count, ": ",
           error.what());
    }
  }
  ~Run() { stop_workers(); }

  void supersede() {
    superseded_ = true;
    stop_workers();
  }

  bool at_end() const {
    return !superseded_ && (ended_ || position_ == int64_t(job_->batches.size()));
  }

  Batch& current() {
    check();
    if (!taken_) take();
    if (made_.error) std::rethrow_exception(made_.error);
    return made_.batch;
  }

  void advance() {
    check();
    if (!taken_) take();
    ended_ = failed_;
    if (failed_) return;
    taken_ = false;
    made_ = {};
    ++position_;
  }

 private:
  void check() const {
    if (superseded_)
      fail(
          "[DataLoader] this loop was ended by a newer one over the same loader: use one loader "
          "for each loop that is open");
    if (at_end()) fail("[DataLoader] the loop is at its end");
  }

  void take() {
    taken_ = true;
    try {
      made_ = threads_.empty() ? make(*job_, position_, [](int64_t) { return true; }) : receive();
      progress_->batches = position_ + 1;
    } catch (...) {  // no batch, nor an error in its place
      made_.error = std::current_exception();
      failed_ = true;
    }
  }

  Made receive() {
    Job& job = *job_;
    const auto& worker = job.workers[size_t(position_ % job.num_workers)];
    auto& slot = job.slots[size_t(position_ % int64_t(job.slots.size()))];
    std::unique_lock lock(job.mutex);
    const auto arrived = [&] { return slot.ready || worker.error; };
    if (timeout_ == 0) {
      job.changed.wait(lock, arrived);
    } else if (!job.changed.wait_for(lock, std::chrono::duration<double>(timeout_), arrived)) {
      job.stop = true;
      job.changed.notify_all();
      const int64_t id = position_ % job.num_workers;
      const std::string doing = worker.sample < 0
                                    ? "has not begun with a sample"
                                    : concat("has been in sample ", worker.sample, " for ",
                                             rounded(seconds_since(worker.since)), " s");
      fail("[DataLoader] batch ", position_, " timed out after ", rounded(timeout_),
           " seconds: worker ", id, " of ", job.num_workers, " ", doing,
           "; make Dataset::get faster, or raise `timeout`");
    }
    if (worker.error && !slot.ready) {
      job.stop = true;
      job.changed.notify_all();
      std::rethrow_exception(worker.error);
    }
    Made made = std::move(slot.made);
    slot = {};
    job.position = position_ + 1;
    job.changed.notify_all();
    return made;
  }

  void stop_workers() {
    if (threads_.empty()) return;
    Job& job = *job_;
    std::unique_lock lock(job.mutex);
    job.stop = true;
    job.changed.notify_all();
    job.changed.wait_for(lock, kPatience, [&] {
      for (const auto& worker : job.workers)
        if (!worker.finished) return false;
      return true;
    });
    for (size_t id = 0; id < threads_.size(); ++id) {
      const auto& worker = job.workers[id];
      if (worker.finished) {
        lock.unlock();
        threads_[id].join();
        lock.lock();
        continue;
      }
      std::fprintf(stderr, "[DataLoader] worker %zu is still in sample %lld and is left behind\n",
                   id, static_cast<long long>(worker.sample));
      threads_[id].detach();
    }
    threads_.clear();
  }

  std::shared_ptr<Job> job_;
  double timeout_;
  std::shared_ptr<LoaderState> progress_;
  std::vector<std::thread> threads_;
  int64_t position_ = job_->first;
  Made made_;  // of position_, if taken_
  bool taken_ = false;
  bool failed_ = false;  // the epoch cannot go on
  bool ended_ = false;   // and the loop has seen why
  bool superseded_ = false;
};

struct DataLoader::Parts {
  std::shared_ptr<const Dataset> dataset;
  LoaderOptions options;
  uint64_t seed = 0;
  uint64_t fingerprint = 0;  // the dataset's
  std::unique_ptr<Sampler> own_sampler;
  std::unique_ptr<BatchSampler> own_batch_sampler;
  BatchSampler* batch_sampler = nullptr;
  int64_t times_set = -1;  // the sampler's, when the last loop began; -1: none has
  std::optional<LoaderState> resume;
  std::shared_ptr<LoaderState> progress = std::make_shared<LoaderState>();
  std::weak_ptr<Run> run;

  void check_options() const;
  void make_samplers();
  LoaderState state_after(int64_t batches) const {
    return {batch_sampler->epoch(), batches,
            batch_sampler->size(),  seed,
            batch_sampler->start(), batch_sampler->global_batch(),
            dataset->size(),        fingerprint};
  }
  // Of an epoch's whole, which may depend on the epoch. The sampler is left as it was.
  int64_t size_in(int64_t epoch) {
    BatchSampler& sampler = *batch_sampler;
    const int64_t epoch_now = sampler.epoch(), start_now = sampler.start();
    const bool is_set = sampler.times_set() != times_set;
    sampler.set_epoch(epoch);
    const int64_t size = sampler.size();
    sampler.set_epoch(epoch_now);
    if (start_now > 0) sampler.set_start(start_now);
    if (!is_set) times_set = sampler.times_set();
    return size;
  }
  void end_run() {
    if (const auto open = run.lock()) open->supersede();
  }
};

void DataLoader::Parts::check_options() const {
  const LoaderOptions& o = options;
  if (!dataset) fail("[DataLoader] the dataset is a null pointer");
  if (o.batch_sampler) {
    if (o.batch_size != 1 || o.shuffle || o.sampler || o.drop_last)
      fail(
          "[DataLoader] batch_sampler excludes batch_size, shuffle, sampler and drop_last: it "
          "decides them");
  } else if (!o.batch_size) {
    if (o.drop_last) fail("[DataLoader] drop_last needs batches: batch_size is nullopt");
    if (o.collate_fn) fail("[DataLoader] collate_fn needs batches: batch_size is nullopt");
  } else if (*o.batch_size < 1) {
    fail("[DataLoader] batch_size must be at least 1, got ", *o.batch_size);
  }
  if (o.sampler && o.shuffle)
    fail("[DataLoader] sampler excludes shuffle: the sampler decides the order");
  if (o.num_workers < 0 || o.num_workers > kMostWorkers)
    fail("[DataLoader] num_workers must be 0 to ", kMostWorkers, ", got ", o.num_workers);
  if (!(o.timeout >= 0 && o.timeout <= kLongestTimeout))
    fail("[DataLoader] timeout must be 0 (none) to ", rounded(kLongestTimeout), " seconds, got ",
         rounded(o.timeout));
  if (o.prefetch_factor < 1 || o.prefetch_factor > kMostPrefetched)
    fail("[DataLoader] prefetch_factor must be 1 to ", kMostPrefetched, ", got ",
         o.prefetch_factor);
}

void DataLoader::Parts::make_samplers() {
  if (options.batch_sampler) {
    batch_sampler = options.batch_sampler;
    return;
  }
  const int64_t n = dataset->size();
  own_sampler.reset();
  if (options.shuffle)
    own_sampler = std::make_unique<RandomSampler>(n, RandomOptions{.seed = seed});
  else if (!options.sampler)
    own_sampler = std::make_unique<SequentialSampler>(n);
  own_batch_sampler =
      std::make_unique<BatchSampler>(options.sampler ? *options.sampler : *own_sampler,
                                     options.batch_size.value_or(1), options.drop_last);
  batch_sampler = own_batch_sampler.get();
}

DataLoader::DataLoader(const Dataset& dataset, LoaderOptions options)
    : DataLoader(std::shared_ptr<const Dataset>(std::shared_ptr<void>(), &dataset),
                 std::move(options)) {}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : parts_(std::make_unique<Parts>()) {
  parts_->dataset = std::move(dataset);
  parts_->options = std::move(options);
  parts_->check_options();
  parts_->seed = parts_->options.seed.value_or(default_generator().state().seed);
  parts_->fingerprint = parts_->dataset->fingerprint();
  parts_->make_samplers();
  *parts_->progress = parts_->state_after(0);
}

DataLoader::~DataLoader() = default;

int64_t DataLoader::size() const { return parts_->batch_sampler->size(); }
void DataLoader::set_epoch(int64_t epoch) { parts_->batch_sampler->set_epoch(epoch); }
uint64_t DataLoader::seed() const { return parts_->seed; }

LoaderState DataLoader::state_dict() const { return *parts_->progress; }

void DataLoader::load_state_dict(const LoaderState& state) {
  Parts& p = *parts_;
  if (state.epoch < 0 || state.batches < 0 || state.batches > state.batches_per_epoch ||
      state.start < 0 || state.global_batch < 0)
    fail("[DataLoader] the state is damaged: epoch ", state.epoch, ", ", state.batches, " of ",
         state.batches_per_epoch, " batches of ", state.global_batch, " samples, from ",
         state.start, " on");
  if (state.dataset_size != p.dataset->size())
    fail("[DataLoader] the state is of a dataset of ", state.dataset_size,
         " samples, and this one has ", p.dataset->size());
  if (state.dataset_fingerprint && p.fingerprint && state.dataset_fingerprint != p.fingerprint)
    fail("[DataLoader] the state is of another dataset of ", state.dataset_size,
         " samples: take the data and the sequence length that it was made with, or go on without "
         "the loader's state");
  const int64_t own_batch = p.batch_sampler->global_batch();
  if ((state.global_batch == 0) != (own_batch == 0))
    fail("[DataLoader] the state is of batches of ", state.global_batch,
         " samples over all ranks (0: from a list), and this loader has ", own_batch,
         ": batch size and number of ranks must be as they were");
  const int64_t batches = p.size_in(state.epoch);
  const bool is_same = state.global_batch == own_batch && state.batches_per_epoch == batches;
  if (own_batch == 0 && !is_same)
    fail("[DataLoader] the state is of a loader with ", state.batches_per_epoch,
         " batches an epoch, and this one has ", batches, ": the batches must be as they were");
  if (!p.batch_sampler->can_start() && (state.start > 0 || (state.batches > 0 && !is_same)))
    fail("[DataLoader] the state is of ", state.batches, " of ", state.batches_per_epoch,
         " batches of ", state.global_batch, " samples, from ", state.start,
         " on, and this loader's sampler cannot begin in the middle of an epoch: batch size and "
         "number of ranks must be as they were");
  p.end_run();
  p.seed = state.seed;
  p.make_samplers();
  p.batch_sampler->set_epoch(state.epoch);
  if (state.global_batch == own_batch) p.batch_sampler->set_start(state.start);
  if (state.global_batch == own_batch && state.batches_per_epoch == size()) {
    p.resume = state;
  } else {
    const bool done = state.batches == state.batches_per_epoch;
    p.batch_sampler->set_start(done ? kAllSamples
                                    : state.start + state.batches * state.global_batch);
    p.resume = p.state_after(0);
  }
  // A copy: an iterator that is still there keeps the old one.
  p.progress = std::make_shared<LoaderState>(*p.resume);
}

DataLoader::Iterator DataLoader::begin() {
  Parts& p = *parts_;
  const LoaderOptions& o = p.options;
  p.end_run();
  BatchSampler& sampler = *p.batch_sampler;
  if (!p.resume && sampler.times_set() == p.times_set) sampler.set_epoch(sampler.epoch() + 1);
  p.times_set = sampler.times_set();

  auto job = std::make_shared<Job>();
  job->dataset = p.dataset;
  if (o.batch_sampler || o.batch_size)
    job->collate_fn = o.collate_fn ? o.collate_fn : CollateFn(stack_samples);
  job->worker_init_fn = o.worker_init_fn;
  job->batches = sampler.batches();
  if (int64_t(job->batches.size()) != size())
    fail("[DataLoader] the sampler says that it has ", size(), " batches, and made ",
         job->batches.size());
  job->seed = p.seed;
  job->epoch = sampler.epoch();
  job->rank = sampler.rank();
  job->num_workers = o.num_workers;
  job->context = &Context::current();
  if (p.resume && p.resume->epoch == job->epoch) job->first = p.resume->batches;
  job->position = job->first;
  p.resume.reset();
  if (job->first < size()) {
    job->workers.resize(size_t(o.num_workers));
    job->slots.resize(size_t(o.num_workers * o.prefetch_factor));
  }
  p.progress = std::make_shared<LoaderState>(p.state_after(job->first));
  auto run = std::make_shared<Run>(std::move(job), o.timeout, p.progress);
  p.run = run;
  return Iterator(std::move(run));
}

Batch& DataLoader::Iterator::operator*() const { return run_->current(); }
DataLoader::Iterator& DataLoader::Iterator::operator++() {
  run_->advance();
  return *this;
}
bool DataLoader::Iterator::operator==(std::default_sentinel_t) const { return run_->at_end(); }

}  // namespace sherd::data
