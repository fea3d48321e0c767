// The main job by its command line against PyTorch's runs (tests/goldens): every strategy at 1, 2
// and 4 ranks gives every step's loss and gradient norm, and the final weights.
#include <gtest/gtest.h>

#include <cmath>

#include "core/safetensors.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;

struct Difference {
  double weights = 0, key_bias = 0;  // largest, absolute
};

// The true gradient of the keys' bias is zero, and AdamW there follows rounding noise: see the
// goldens' README.
Difference compare(const std::map<std::string, Tensor>& got,
                   const std::map<std::string, Tensor>& expected) {
  Difference d;
  EXPECT_EQ(got.size(), expected.size());
  for (auto& [name, e] : expected) {
    const auto it = got.find(name);
    if (it == got.end() || it->second.sizes() != e.sizes() || it->second.dtype() != kFloat32) {
      ADD_FAILURE() << name << " is missing, or of another shape or dtype";
      continue;
    }
    const bool in_proj_bias = name.ends_with("in_proj_bias");
    const int64_t n = e.numel();
    for (int64_t i = 0; i < n; ++i) {
      const double x = std::abs(it->second.data<float>()[i] - e.data<float>()[i]);
      double& most = in_proj_bias && i / (n / 3) == 1 ? d.key_bias : d.weights;
      if (!(x <= most)) most = x;
    }
  }
  return d;
}

class Golden
    : public testing::TestWithParam<std::tuple<const char* /*case*/, int /*ranks*/, const char*>> {
};

void expect_same_numbers(const char* name, int ranks, const char* strategy, const Flags& flags) {
  const std::string folder = dist::new_folder();
  const bool hybrid = std::string(strategy).starts_with("hybrid");
  const dist::Result r = big_model(
      golden_flags(name, ranks) +
      Flags{concat("--strategy=", strategy), concat("--shard_group_size=", hybrid ? 2 : 0),
            concat("--init_from=", kGoldens, name, "/init.safetensors"),
            "--save_weights=" + folder + "/final.safetensors", "--log_jsonl=" + folder + "/log"} +
      flags);
  ASSERT_EQ(r.exit_code, 0) << r.err;

  const auto log = read_log(folder + "/log");
  EXPECT_EQ(log.at(0)["config"]["strategy"], strategy);
  EXPECT_EQ(log.at(0)["config"]["world_size"], ranks);
  const nlohmann::json expected = golden_trace(name)["steps"];
  const auto steps = lines_with(log, "loss");
  ASSERT_EQ(steps.size(), expected.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
    const double loss = expected[i]["loss"], norm = expected[i]["grad_norm"];
    EXPECT_NEAR(steps[i]["loss"].get<double>(), loss, 2e-5 * loss) << "step " << i + 1;
    EXPECT_NEAR(steps[i]["grad_norm"].get<double>(), norm, 2e-4 * norm) << "step " << i + 1;
  }
  const Difference d = compare(load_safetensors(folder + "/final.safetensors"),
                               load_safetensors(concat(kGoldens, name, "/final.safetensors")));
  EXPECT_LE(d.weights, 2e-4);
  EXPECT_LE(d.key_bias, 5e-3);
}

TEST_P(Golden, SameNumbersAsPyTorch) {
  const auto [name, ranks, strategy] = GetParam();
  expect_same_numbers(name, ranks, strategy, {});
}

TEST(GoldenOverMpi, SameNumbersAsPyTorch) {
  if (!sherd::dist::has_mpirun()) GTEST_SKIP() << "mpirun is not installed";
  for (const char* strategy : {"full_shard", "ddp"})
    expect_same_numbers("bigmodel_tiny", 2, strategy, {"--backend=mpi"});
}

INSTANTIATE_TEST_SUITE_P(
    BigModel, Golden,
    testing::Combine(testing::Values("bigmodel_tiny", "bigmodel_odd", "bigmodel_no_mask",
                                     "bigmodel_wide_batch"),
                     testing::Values(1, 2, 4),
                     testing::Values("full_shard", "shard_grad_op", "no_shard", "ddp")),
    [](const auto& p) {
      return concat(std::get<0>(p.param), "_", std::get<1>(p.param), "_ranks_",
                    std::get<2>(p.param));
    });

// Two ranks that share a copy, twice.
INSTANTIATE_TEST_SUITE_P(Hybrid, Golden,
                         testing::Combine(testing::Values("bigmodel_tiny", "bigmodel_odd"),
                                          testing::Values(4),
                                          testing::Values("hybrid_shard", "hybrid_shard_zero2")),
                         [](const auto& p) {
                           return concat(std::get<0>(p.param), "_", std::get<2>(p.param));
                         });

}  // namespace
}  // namespace examples
