#include "distributed/checkpoint/checkpointer.h"

#include <exception>
#include <filesystem>

#include "core/context.h"
#include "core/generator.h"
#include "distributed/agree.h"
#include "distributed/distributed.h"

namespace sherd::dist {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

json to_json(const Generator::State& g) {
  return {{"seed", g.seed}, {"stream", g.stream}, {"draws", g.draws}};
}
json to_json(const data::LoaderState& l) {
  return {{"epoch", l.epoch},
          {"batches", l.batches},
          {"batches_per_epoch", l.batches_per_epoch},
          {"seed", l.seed},
          {"start", l.start},
          {"global_batch", l.global_batch},
          {"dataset_size", l.dataset_size},
          {"dataset_fingerprint", l.dataset_fingerprint}};
}
data::LoaderState loader_state(const json& j) {
  return {j.at("epoch"),
          j.at("batches"),
          j.at("batches_per_epoch"),
          j.at("seed"),
          j.at("start"),
          j.at("global_batch"),
          j.at("dataset_size"),
          j.value("dataset_fingerprint", uint64_t(0))};  // not in those of earlier versions
}

json own_state(const TrainingState& s) {
  json own = {{"generator", to_json(default_generator().state())}};
  if (s.loader) own["loader"] = to_json(s.loader->state_dict());
  return own;
}
json common_state(const TrainingState& s) {
  json common = {{"step", s.step}, {"user", s.user}};
  if (s.scheduler) common["scheduler"] = {{"last_epoch", s.scheduler->last_epoch()}};
  return common;
}

// Everything but tensors, of this rank. What is none was not saved, or is another world's.
struct Rest {
  int64_t step = 0;
  json user;
  std::optional<data::LoaderState> loader;
  std::optional<int64_t> last_epoch;
  std::optional<Generator::State> generator;
};

Rest rest_of(const json& stored, int rank, int world) {
  Rest rest;
  try {
    const json &common = stored.at("common"), &ranks = stored.at("ranks");
    const bool same_world = int(ranks.size()) == world;
    const json& own = ranks.at(same_world ? size_t(rank) : 0);
    rest.step = common.at("step");
    rest.user = common.at("user");
    if (own.contains("loader")) rest.loader = loader_state(own.at("loader"));
    if (common.contains("scheduler"))
      rest.last_epoch = common.at("scheduler").at("last_epoch").get<int64_t>();
    if (same_world && own.contains("generator")) {
      const json& g = own.at("generator");
      rest.generator = {g.at("seed"), g.at("stream"), g.at("draws")};
    }
  } catch (const json::exception& e) {
    fail("[checkpoint] the state lacks a part, or has another kind of it: ", e.what());
  }
  return rest;
}

}  // namespace

Checkpointer::Checkpointer(std::string folder, Group group, CheckpointerOptions options)
    : folder_(std::move(folder)), group_(std::move(group)), options_(std::move(options)) {
  if (folder_.empty()) fail("[Checkpointer] needs the name of a folder");
}

Checkpointer::~Checkpointer() {
  try {
    wait();
  } catch (const std::exception& e) {
    if (rank_in(group_) == 0)
      options_.report(concat("the last checkpoint was not saved: ", e.what()));
  }
  // An exception on its way may be this rank's alone: others would not come to say farewell.
  if (!own_group_ || !is_initialized() || std::uncaught_exceptions() > 0) return;
  try {
    destroy_process_group(own_group_);
  } catch (const std::exception&) {  // it failed before, and that was said
  }
}

void Checkpointer::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Checkpointer::save(const TrainingState& state) {
  const CollectiveCall call("Checkpointer::save");
  wait();
  begin(state.step);
  if (options_.format == CheckpointFormat::kFull)
    save_full(state);
  else
    start(state, false);
}

void Checkpointer::async_save(const TrainingState& state) {
  const CollectiveCall call("Checkpointer::async_save");
  if (options_.format == CheckpointFormat::kFull)
    fail(
        "[async_save] a full checkpoint goes through rank 0 while training waits: use the sharded "
        "format, or save()");
  wait();
  begin(state.step);
  start(state, true);
}

void Checkpointer::begin(int64_t step) {
  const std::vector<int64_t> steps = all_gather_number(group_, step);
  for (size_t rank = 1; rank < steps.size(); ++rank)
    if (steps[rank] != steps[0])
      fail("[Checkpointer] ranks save different steps: rank 0 step ", steps[0], ", rank ", rank,
           " step ", steps[rank], "; a checkpoint is of one step of all ranks");
  damaged_.erase(step);  // this one takes its place
}

void Checkpointer::start(const TrainingState& state, bool async) {
  LocalState mine;
  all_or_none(group_, [&] {
    mine = local_state(state.model, state.optimizer);
    mine.own = own_state(state);
    mine.common = common_state(state);
    if (async) mine = staged(std::move(mine), copies_);
  });
  const CheckpointOptions options{.keep_last = options_.keep_last,
                                  .damaged = damaged_,
                                  .overwrite = options_.overwrite,
                                  .report = options_.report,
                                  .on_stage = options_.on_stage};
  if (!async) {
    save_shards(group_, folder_, state.step, mine, options);
    return;
  }
  if (!own_group_ && size_of_group(group_) > 1)
    own_group_ = new_group(group_->ranks(), {}, /*use_local_synchronization=*/true);
  copies_ = std::move(mine);
  const auto work = [this, options, step = state.step, context = &Context::current()] {
    ContextGuard guard(*context);
    try {
      save_shards(own_group_, folder_, step, copies_, options);
    } catch (...) {
      error_ = std::current_exception();
    }
    saving_ = false;
  };
  saving_ = true;
  try {
    thread_ = std::thread(work);
  } catch (const std::system_error&) {  // the system has no thread more: training waits
    work();
  }
}

void Checkpointer::save_full(const TrainingState& state) {
  const std::vector<std::string> own = all_gather_text(group_, own_state(state).dump());
  std::unique_ptr<CheckpointWriter> writer;
  const bool is_first = rank_in(group_) == 0;
  all_or_none(group_, [&] {
    if (is_first)
      writer = std::make_unique<CheckpointWriter>(folder_, state.step,
                                                  CheckpointOptions{.keep_last = options_.keep_last,
                                                                    .damaged = damaged_,
                                                                    .overwrite = options_.overwrite,
                                                                    .report = options_.report,
                                                                    .on_stage = options_.on_stage});
  });
  const auto path = [&](const char* name) { return writer ? writer->path(name) : std::string(); };
  ModelState model = state.model;
  const FileSummary weights = save_weights(path(kModelFile), model);
  FileSummary moments;
  if (state.optimizer) moments = save_optimizer(path(kOptimizerFile), model, *state.optimizer);
  all_or_none(group_, [&] {
    if (!is_first) return;
    writer->add(kModelFile, weights);
    if (state.optimizer) writer->add(kOptimizerFile, moments);
    json ranks = json::array();
    for (auto& text : own) ranks.push_back(json::parse(text));
    writer->commit({{"common", common_state(state)}, {"ranks", ranks}});
  });
}

void Checkpointer::load(const std::string& path, TrainingState& state, const LoadOptions& options) {
  load(path, std::nullopt, state, options);
}

void Checkpointer::load(const std::string& path, std::optional<int64_t> step, TrainingState& state,
                        const LoadOptions& options) {
  const CollectiveCall call("Checkpointer::load");
  wait();
  const int rank = rank_in(group_), world = size_of_group(group_);
  all_or_none(group_, [&] { need_readable(path); });
  std::unique_ptr<ShardReader> reader;
  all_or_none<DamagedCheckpoint>(group_, [&] {
    try {
      const Checkpoint c = open_checkpoint(path, Verify::kSizes);
      // A folder that was renamed would be taken for the newest for ever.
      if (step && c.step != *step) fail("[checkpoint] ", path, " holds step ", c.step);
      // Blocks of shards are verified as they are read; whole files by one rank for all.
      if (!c.files.contains(kShardIndex) && rank == 0) open_checkpoint(path);
      reader = std::make_unique<ShardReader>(c);
    } catch (const Error& e) {
      throw DamagedCheckpoint(e.what());
    }
  });
  Rest rest;
  all_or_none(group_, [&] { rest = rest_of(reader->state(), rank, world); });
  const bool loads_position = state.loader && rest.loader;
  // The loader comes first, for it may refuse its part, and can be put back.
  const data::LoaderState before =
      loads_position ? state.loader->state_dict() : data::LoaderState();
  try {
    all_or_none(group_, [&] {
      if (loads_position) state.loader->load_state_dict(*rest.loader);
    });
    load_state(*reader, state.model, state.optimizer, options);
  } catch (...) {
    if (loads_position) state.loader->load_state_dict(before);
    throw;
  }
  if (state.scheduler) state.scheduler->step(rest.last_epoch.value_or(0));  // sets the lr, too
  if (rest.generator) default_generator().set_state(*rest.generator);
  state.step = rest.step;
  state.user = rest.user;
  const auto say_anew = [&](const char* what) {
    if (rank == 0) options_.report(concat(path, " holds no ", what, ": it begins anew"));
  };
  if (state.scheduler && !rest.last_epoch) say_anew("schedule");
  if (state.loader && !rest.loader) say_anew("position in the data");
}

std::optional<std::string> Checkpointer::load_latest(TrainingState& state,
                                                     const LoadOptions& options) {
  const CollectiveCall call("Checkpointer::load_latest");
  wait();
  // Rank 0 looks for all: others might see another list.
  std::string found;
  all_or_none(group_, [&] {
    if (rank_in(group_) == 0) found = json(checkpoint_steps(folder_)).dump();
  });
  const auto steps = json::parse(all_gather_text(group_, found)[0]).get<std::vector<int64_t>>();
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string path = folder_ + "/" + checkpoint_name(*step);
    try {
      load(path, *step, state, options);
      return path;
    } catch (const DamagedCheckpoint& e) {
      damaged_.insert(*step);
      if (rank_in(group_) == 0)
        options_.report(
            concat("passing over ", checkpoint_name(*step), ", which is not whole: ", e.what()));
    }
  }
  if (!steps.empty())
    fail("[checkpoint] none of the ", steps.size(), " checkpoints in ", folder_,
         " is whole; remove them to start afresh");
  return {};
}

void load_weights_from(const std::string& path, ModelState& model) {
  const CollectiveCall call("load_weights_from");
  if (!fs::is_directory(path)) return load_weights(path, model);
  std::unique_ptr<ShardReader> reader;
  all_or_none<DamagedCheckpoint>(model.group(), [&] {
    const Checkpoint c = open_checkpoint(path, Verify::kSizes);
    if (!c.files.contains(kShardIndex) && model.is_rank0()) open_checkpoint(path);
    reader = std::make_unique<ShardReader>(c);
  });
  load_state(*reader, model, nullptr);
}

}  // namespace sherd::dist
