// The classic first data parallel script: every rank holds the model, sees its own part of the
// data, and averages gradients with the others.
//
//     ./bazelw run //examples:ddp_toy                                 # 2 ranks here
//     ./bazelw run //examples:ddp_toy -- --nproc_per_node=4 --epochs=20
//     sherdrun --nproc_per_node=2 ddp_toy                             # or under a launcher
//     mpirun -n 2 ddp_toy
#include <cmath>
#include <cstdio>

#include "cli/paths.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "distributed/checkpoint/full_state.h"
#include "examples/support/main.h"
#include "examples/toy_model.h"

namespace examples {
namespace {

struct Options {
  int64_t epochs = 10, batch_size = 32, dataset_size = 2048, save_interval = 5;
  double lr = 0.05;
  std::string checkpoint_dir = "ddp_toy_checkpoints";
};

// Rank 0 alone: with data parallelism it holds everything. The checkpoint appears whole or not at
// all.
void save(const std::string& folder, int64_t epoch, ToyModel& model, const optim::SGD& optimizer) {
  dist::ModelState state(model, /*group=*/nullptr);
  dist::CheckpointWriter writer(folder, epoch, {.overwrite = true});
  writer.add("model.safetensors", dist::save_weights(writer.path("model.safetensors"), state));
  writer.add("optimizer.safetensors",
             dist::save_optimizer(writer.path("optimizer.safetensors"), state, optimizer));
  std::printf("saved %s\n", writer.commit({{"epoch", epoch}}).c_str());
}

void load(const std::string& folder, int64_t epoch, ToyModel& model, optim::SGD& optimizer) {
  dist::ModelState state(model, /*group=*/nullptr);
  const dist::Checkpoint checkpoint =
      dist::open_checkpoint(folder + "/" + dist::checkpoint_name(epoch));
  dist::load_weights(checkpoint.file("model.safetensors"), state);
  dist::load_optimizer(checkpoint.file("optimizer.safetensors"), state, optimizer);
}

// Those of another program would be replaced where they are of the same step.
void need_own_checkpoints(const std::string& folder) {
  for (int64_t step : dist::checkpoint_steps(folder)) {
    const std::string path = folder + "/" + dist::checkpoint_name(step);
    bool is_own = true;
    try {
      is_own = dist::open_checkpoint(path, dist::Verify::kSizes).state.contains("epoch");
    } catch (const Error&) {  // not whole: it is no loss
    }
    if (!is_own)
      fail("--checkpoint_dir=", folder,
           " holds checkpoints of another program: give another folder");
  }
}

// sum / count, of all ranks' sums and counts.
double mean_over_ranks(double sum, int64_t count) {
  Tensor both = tensor<double>({sum, double(count)});
  dist::all_reduce(both);
  return both.data<double>()[0] / both.data<double>()[1];
}

void train(const Options& o) {
  dist::init_process_group();
  const bool is_rank0 = dist::rank() == 0;
  ToyDataset dataset(o.dataset_size);
  ToyModel model;
  DistributedDataParallel ddp(model);
  optim::SGD optimizer(ddp.parameters(), {.lr = o.lr});
  data::DistributedSampler sampler(dataset.size(),
                                   {.num_replicas = dist::world_size(), .rank = dist::rank()});
  data::DataLoader loader(dataset, {.batch_size = o.batch_size, .sampler = &sampler});

  for (int64_t epoch = 1; epoch <= o.epochs; ++epoch) {
    sampler.set_epoch(epoch);  // another order each time
    double sum = 0;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      Tensor loss = F::mse_loss(ddp(batch.at("x")), batch.at("y"));
      loss.backward();
      optimizer.step();
      sum += loss.item() * double(batch.at("x").size(0));
    }
    const double loss = mean_over_ranks(sum, sampler.size());
    if (is_rank0) std::printf("epoch %2ld  loss %.6f\n", epoch, loss);
    if (!std::isfinite(loss))
      fail("the loss is ", loss, " in epoch ", epoch, ": try a smaller --lr");
    const bool saves = o.save_interval > 0 && (epoch == o.epochs || epoch % o.save_interval == 0);
    if (saves && is_rank0) save(o.checkpoint_dir, epoch, ddp.module(), optimizer);
  }

  if (o.save_interval > 0 && o.epochs > 0) {
    dist::barrier();  // nobody reads before rank 0 has written
    ToyModel loaded;
    optim::SGD its_optimizer(loaded.parameters(), {.lr = o.lr});
    load(o.checkpoint_dir, o.epochs, loaded, its_optimizer);
    NoGrad off;
    double sum = 0;
    for (auto& batch : loader) {
      const Tensor error = F::mse_loss(nn::call(loaded, batch.at("x")), batch.at("y"));
      sum += error.item() * double(batch.at("x").size(0));
    }
    const double loss = mean_over_ranks(sum, sampler.size());
    if (is_rank0) std::printf("loaded it again: loss %.6f\n", loss);
  }
  dist::destroy_process_group();
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) {
  examples::Options o;
  CLI::App app{"Trains Linear(10, 1) on random pairs, data parallel."};
  using sherd::cli::whole_number;
  app.add_option("--epochs", o.epochs)->transform(whole_number(0));
  app.add_option("--batch_size", o.batch_size, "samples a rank")
      ->transform(whole_number(1, 1 << 20));
  app.add_option("--lr", o.lr)->check(sherd::cli::number());
  app.add_option("--dataset_size", o.dataset_size)->transform(whole_number(1, 1 << 24));
  app.add_option("--save_interval", o.save_interval, "epochs; 0: nothing is saved")
      ->transform(whole_number(0));
  app.add_option("--checkpoint_dir", o.checkpoint_dir);
  const auto check = [&] {
    o.checkpoint_dir = sherd::cli::from_user(o.checkpoint_dir);
    if (o.save_interval == 0) return;
    sherd::cli::need_folder("--checkpoint_dir", o.checkpoint_dir);
    examples::need_own_checkpoints(o.checkpoint_dir);
  };
  return examples::run_ranks(
      app, /*nproc_per_node=*/2, argc, argv, [&] { examples::train(o); }, check);
}
