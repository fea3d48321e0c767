#include "examples/support/run_state.h"

#include <ctime>
#include <filesystem>

#include "examples/support/corpus.h"

namespace examples {

using namespace sherd;
namespace fs = std::filesystem;

namespace {

std::string in_one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n';
    if (!space || !line.ends_with(' ')) line += space ? ' ' : c;
  }
  return line;
}

}  // namespace

UsageError::UsageError(const std::string& text) : Error(in_one_line(text)) {}

std::optional<dist::Checkpoint> open_checkpoints(Options& o) {
  if (o.resume && o.checkpoint_dir.empty()) throw UsageError("--resume needs --checkpoint_dir");
  if (o.checkpoint_dir.empty()) {
    if (o.save_interval > 0) {
      char name[32];
      const std::time_t now = std::time(nullptr);
      std::strftime(name, sizeof name, "%Y%m%d-%H%M%S", std::localtime(&now));
      o.checkpoint_dir = (fs::path(cache_folder()) / "runs" / concat("big_model-", name)).string();
    }
    return {};
  }
  const bool any = !dist::checkpoint_steps(o.checkpoint_dir).empty();
  dist::barrier();  // all have looked before anything is removed
  if (!any) return {};
  if (o.overwrite) {
    if (dist::rank() == 0) dist::remove_checkpoints(o.checkpoint_dir);
    dist::barrier();
    return {};
  }
  if (!o.resume)
    throw UsageError(
        o.checkpoint_dir +
        " holds checkpoints: go on from them with --resume, or start afresh with --overwrite");
  try {
    return dist::latest_checkpoint(o.checkpoint_dir, [](const std::string& line) {
      if (dist::rank() == 0) dist::report_to_stderr(line);
    });
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

void save_run(const std::string& folder, int64_t step, RunState& run,
              const nlohmann::json& config) {
  std::unique_ptr<dist::CheckpointWriter> writer;
  std::string error;
  auto on_rank0 = [&](const std::function<void()>& f) {
    if (dist::rank() == 0) {
      try {
        f();
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    dist::throw_if_rank0_failed(run.model, error);
  };
  on_rank0([&] {
    writer = std::make_unique<dist::CheckpointWriter>(
        folder, step, dist::CheckpointOptions{.keep_last = 2, .overwrite = true});
  });
  auto path = [&](const char* name) { return writer ? writer->path(name) : std::string(); };
  const FileSummary weights = dist::save_weights(path("model.safetensors"), run.model);
  const FileSummary moments =
      dist::save_optimizer(path("optimizer.safetensors"), run.model, run.optimizer);
  const Generator::State g = default_generator().state();
  const Tensor mine = tensor({int64_t(g.seed), int64_t(g.stream), int64_t(g.draws)});
  Tensor all = empty({3 * dist::world_size()}, kInt64);
  dist::all_gather_into_tensor(all, mine);
  on_rank0([&] {
    const data::LoaderState l = run.loader.state();
    writer->add("model.safetensors", weights);
    writer->add("optimizer.safetensors", moments);
    writer->commit({{"step", step},
                    {"config", config},
                    {"schedule_step", run.schedule.last_epoch()},
                    {"loader",
                     {{"epoch", l.epoch},
                      {"batches", l.batches},
                      {"batches_per_epoch", l.batches_per_epoch},
                      {"seed", l.seed}}},
                    {"generators", std::vector<int64_t>(all.data<int64_t>(),
                                                        all.data<int64_t>() + all.numel())}});
  });
}

int64_t load_run(const dist::Checkpoint& c, RunState& run) {
  try {
    dist::load_weights(c.file("model.safetensors"), run.model);
    dist::load_optimizer(c.file("optimizer.safetensors"), run.model, run.optimizer);
    run.schedule.step(c.state.at("schedule_step").get<int64_t>());
    const auto& l = c.state.at("loader");
    run.loader.load_state(
        {l.at("epoch"), l.at("batches"), l.at("batches_per_epoch"), l.at("seed")});
  } catch (const std::exception& e) {
    throw UsageError(e.what());
  }
  // At another world size the ranks draw anew.
  const auto g = c.state.at("generators").get<std::vector<int64_t>>();
  if (int64_t(g.size()) == 3 * dist::world_size()) {
    const int64_t* mine = g.data() + 3 * dist::rank();
    default_generator().set_state({uint64_t(mine[0]), uint64_t(mine[1]), uint64_t(mine[2])});
  }
  return c.step;
}

}  // namespace examples
