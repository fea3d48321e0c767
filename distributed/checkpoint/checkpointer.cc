#include "distributed/checkpoint/checkpointer.h"

#include <filesystem>

#include "core/context.h"
#include "core/generator.h"
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
          {"dataset_size", l.dataset_size}};
}
data::LoaderState loader_state(const json& j) {
  return {j.at("epoch"), j.at("batches"),      j.at("batches_per_epoch"), j.at("seed"),
          j.at("start"), j.at("global_batch"), j.at("dataset_size")};
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

// Everything but tensors.
void load_rest(const json& stored, int rank, int world, TrainingState& s) {
  try {
    const json &common = stored.at("common"), &ranks = stored.at("ranks");
    const bool same_world = int(ranks.size()) == world;
    const json& own = ranks.at(same_world ? size_t(rank) : 0);
    if (s.loader) s.loader->load_state_dict(loader_state(own.at("loader")));
    if (s.scheduler) s.scheduler->step(common.at("scheduler").at("last_epoch").get<int64_t>());
    s.step = common.at("step");
    s.user = common.at("user");
    if (!same_world || !own.contains("generator")) return;  // made by to_sharded
    const json& g = own.at("generator");
    default_generator().set_state({g.at("seed"), g.at("stream"), g.at("draws")});
  } catch (const json::exception& e) {
    fail("[checkpoint] the state has no part that this run wants, or another kind of it: ",
         e.what());
  }
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
}

void Checkpointer::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Checkpointer::save(const TrainingState& state) {
  wait();
  if (options_.format == CheckpointFormat::kFull)
    save_full(state);
  else
    start(state, false);
}

void Checkpointer::async_save(const TrainingState& state) {
  if (options_.format == CheckpointFormat::kFull)
    fail(
        "[async_save] a full checkpoint goes through rank 0 while training waits: use the sharded "
        "format, or save()");
  wait();
  start(state, true);
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
                                  .overwrite = options_.overwrite,
                                  .report = options_.report,
                                  .on_stage = options_.on_stage};
  if (!async) {
    save_shards(group_, folder_, state.step, mine, options);
    return;
  }
  if (!own_group_ && size_of_group(group_) > 1) own_group_ = new_group(group_->ranks());
  copies_ = std::move(mine);
  saving_ = true;
  thread_ = std::thread([this, options, step = state.step, context = &Context::current()] {
    ContextGuard guard(*context);
    try {
      save_shards(own_group_, folder_, step, copies_, options);
    } catch (...) {
      error_ = std::current_exception();
    }
    saving_ = false;
  });
}

void Checkpointer::save_full(const TrainingState& state) {
  const std::vector<std::string> own = all_gather_text(group_, own_state(state).dump());
  std::unique_ptr<CheckpointWriter> writer;
  const bool is_first = rank_in(group_) == 0;
  all_or_none(group_, [&] {
    if (is_first)
      writer = std::make_unique<CheckpointWriter>(folder_, state.step,
                                                  CheckpointOptions{.keep_last = options_.keep_last,
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
  wait();
  std::unique_ptr<ShardReader> reader;
  all_or_none(group_, [&] {
    try {
      const Checkpoint c = open_checkpoint(path, Verify::kSizes);
      // Blocks of shards are verified as they are read; whole files by one rank for all.
      if (!c.files.contains(kShardIndex) && rank_in(group_) == 0) open_checkpoint(path);
      reader = std::make_unique<ShardReader>(c);
    } catch (const Error& e) {
      throw DamagedCheckpoint(e.what());
    }
  });
  load_state(*reader, state.model, state.optimizer, options);
  all_or_none(group_,
              [&] { load_rest(reader->state(), rank_in(group_), size_of_group(group_), state); });
}

std::optional<std::string> Checkpointer::load_latest(TrainingState& state,
                                                     const LoadOptions& options) {
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
      load(path, state, options);
      return path;
    } catch (const DamagedCheckpoint& e) {
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
  if (!fs::is_directory(path)) return load_weights(path, model);
  std::unique_ptr<ShardReader> reader;
  all_or_none(model.group(), [&] {
    const Checkpoint c = open_checkpoint(path, Verify::kSizes);
    if (!c.files.contains(kShardIndex) && model.is_rank0()) open_checkpoint(path);
    reader = std::make_unique<ShardReader>(c);
  });
  load_state(*reader, model, nullptr);
}

}  // namespace sherd::dist
