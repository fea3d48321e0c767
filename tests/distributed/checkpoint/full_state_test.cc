// A whole state in one file: what one world saved, another loads, in the dtypes that the model has.
#include "distributed/checkpoint/full_state.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "core/safetensors.h"
#include "distributed/fsdp.h"
#include "nn/nn.h"
#include "optim/adamw.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

// Parameters in three dtypes, buffers that are saved and one that is not.
class Mixed : public nn::Module {
 public:
  explicit Mixed(double start = 0)
      : up(add<nn::Linear>("up", 3, 5)),
        down(add<nn::Linear>("down", 5, 2)),
        fine(parameter("fine", {7}, nn::init::constant(0.1))),
        steps(buffer("steps", full({}, start, kInt64))),
        mean(buffer("mean", full({3}, start + 0.5))),
        scratch(buffer("scratch", full({4}, start), false)) {
    down->to(kBFloat16);
    fine.slot().tensor.set_data(empty({7}, kFloat64, kMeta));
  }
  Tensor forward(const Tensor& x) {
    return down(up(x + mean).to(kBFloat16)).to(kFloat32).sum() + (fine * fine).sum().to(kFloat32);
  }
  nn::Child<nn::Linear> up, down;
  nn::Parameter fine;
  nn::Buffer steps, mean, scratch;
};

std::string path_of(const char* name) { return std::filesystem::path(testing::TempDir()) / name; }

// Every byte of the state, by name; on rank 0.
std::map<std::string, std::string> bytes_of(const nn::StateDict& state) {
  std::map<std::string, std::string> all;
  for (auto& [name, t] : state) {
    const Tensor c = contiguous_raw(t);
    all[name] = concat(t.dtype(), t.sizes(), " ", std::string_view(c.bytes(), size_t(c.nbytes())));
  }
  return all;
}

FsdpOptions by_linear() { return {.auto_wrap_policy = module_wrap_policy<nn::Linear>()}; }

TEST(FullState, AnotherWorldLoadsWhatOneSaved) {
  const std::string weights = path_of("mixed.safetensors"),
                    moments = path_of("moments.safetensors");
  std::map<std::string, std::string> saved, moments_saved;
  run_ranks(3, [&](int rank) {
    manual_seed(5);
    Mixed m(40 + rank);  // rank 0's buffers count
    FullyShardedDataParallel fsdp(m, by_linear());
    optim::AdamW adam(fsdp.parameters(), {.lr = 0.1});
    fsdp(full({2, 3}, 0.3)).backward();
    adam.step();
    ModelState state(fsdp);
    save_weights(weights, state);
    save_optimizer(moments, state, adam);
    const auto all = bytes_of(fsdp.full_state_dict());
    if (rank == 0) saved = all;
  });
  SafetensorsReader file(weights);
  std::map<std::string, DType> dtypes;
  for (auto& t : file.tensors()) dtypes.emplace(t.name, t.dtype);
  EXPECT_EQ(dtypes, (std::map<std::string, DType>{{"up.weight", kFloat32},
                                                  {"up.bias", kFloat32},
                                                  {"down.weight", kBFloat16},
                                                  {"down.bias", kBFloat16},
                                                  {"fine", kFloat64},
                                                  {"steps", kInt64},
                                                  {"mean", kFloat32}}));
  EXPECT_EQ(file.read("steps").item<int64_t>(), 40);
  for (int world : {1, 2, 4})
    run_ranks(world, [&](int rank) {
      manual_seed(6);
      Mixed m(7);
      FullyShardedDataParallel fsdp(m, {});
      ModelState state(fsdp);
      load_weights(weights, state);
      EXPECT_EQ(m.steps->item<int64_t>(), 40);
      EXPECT_EQ(m.scratch->data<float>()[0], 7);
      const auto all = bytes_of(fsdp.full_state_dict());
      if (rank == 0) {
        EXPECT_EQ(all, saved);
      }
      // And as one state in memory.
      manual_seed(8);
      Mixed other(9);
      FullyShardedDataParallel again(other, by_linear());
      nn::StateDict whole;
      SafetensorsReader again_file(weights);
      for (auto& t : again_file.tensors()) whole.set(t.name, again_file.read(t.name));
      again.load_full_state_dict(whole);
      const auto both = bytes_of(again.full_state_dict());
      if (rank == 0) {
        EXPECT_EQ(both, saved);
      }
      EXPECT_EQ(other.mean->data<float>()[2], 40.5f);

      optim::AdamW adam(fsdp.parameters(), {.lr = 0.1});
      load_optimizer(moments, state, adam);
      const std::string copy = moments + std::to_string(world);
      save_optimizer(copy, state, adam);
      if (rank == 0) {
        SafetensorsReader a(moments), b(copy);
        ASSERT_EQ(a.tensors().size(), b.tensors().size());
        for (auto& t : a.tensors()) {
          nn::StateDict one, two;
          one.set(t.name, a.read(t.name)), two.set(t.name, b.read(t.name));
          EXPECT_EQ(bytes_of(one), bytes_of(two)) << t.name;
        }
      }
    });
  // A plain module takes it too.
  Mixed plain(1);
  ModelState state(plain, nullptr);
  load_weights(weights, state);
  EXPECT_EQ(bytes_of(plain.state_dict()), saved);
}

TEST(FullState, OneErrorNamesAllThatDoesNotFit) {
  const std::string path = path_of("other.safetensors");
  {
    nn::StateDict d;
    d.set("up.weight", zeros({5, 4}));
    d.set("up.bias", zeros({5}));
    d.set("stranger", zeros({1}));
    SafetensorsWriter writer(
        path,
        {{"up.weight", kFloat32, {5, 4}}, {"up.bias", kFloat32, {5}}, {"stranger", kFloat32, {1}}});
    for (auto& [name, t] : d) writer.append(t);
    writer.finish();
  }
  run_ranks(2, [&](int) {
    Mixed m;
    FullyShardedDataParallel fsdp(m, by_linear());
    ModelState state(fsdp);
    try {
      load_weights(path, state);
      ADD_FAILURE();
    } catch (const Error& e) {
      for (const char* text :
           {"up.weight", "[5, 4]", "[5, 3]", "stranger", "mean", "steps", "fine"})
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
    EXPECT_EQ(m.steps->item<int64_t>(), 0);
  });
}

TEST(FullState, BuffersThatDifferBetweenRanksAreNamed) {
  run_ranks(2, [&](int rank) {
    struct Model : nn::Module {
      explicit Model(int64_t n)
          : linear(add<nn::Linear>("linear", 2, 2)), table(buffer("table", zeros({n}))) {}
      Tensor forward(const Tensor& x) { return linear(x); }
      nn::Child<nn::Linear> linear;
      nn::Buffer table;
    } m(3 + rank);
    try {
      FullyShardedDataParallel fsdp(m, {});
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("table"), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace sherd::dist
