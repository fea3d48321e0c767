// The main job in bf16: it learns as the float64 run does, and keeps float32 where it must.
#include <gtest/gtest.h>

#include "core/safetensors.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;

class Bf16 : public testing::TestWithParam<const char* /*strategy*/> {};

TEST_P(Bf16, LossFollowsTheTrace) {
  const std::string folder = dist::new_folder();
  const dist::Result r =
      big_model(golden_flags("bigmodel_tiny", 2) +
                Flags{concat("--strategy=", GetParam()), "--precision=bf16",
                      concat("--init_from=", kGoldens, "bigmodel_tiny/init.safetensors"),
                      "--log_jsonl=" + folder + "/log", "--checkpoint_dir=" + folder + "/run",
                      "--checkpoint_format=full", "--save_interval=1000"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const auto log = read_log(folder + "/log");
  EXPECT_EQ(log.at(0)["config"]["precision"], "bf16");
  const auto steps = lines_with(log, "loss");
  const nlohmann::json expected = golden_trace("bigmodel_tiny")["steps"];
  ASSERT_EQ(steps.size(), expected.size());
  double most = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const double loss = steps[i]["loss"], truth = expected[i]["loss"];
    EXPECT_NEAR(loss, truth, 0.03 * truth) << "step " << i + 1;
    most = std::max(most, std::abs(loss - truth));
  }
  EXPECT_GT(most, 1e-4);  // it did compute in bf16

  // Weights that were kept in bf16 would have no bits below its own.
  const auto weights = load_safetensors(folder + "/run/step-000030/model.safetensors");
  const auto moments = load_safetensors(folder + "/run/step-000030/optimizer.safetensors");
  auto has_low_bits = [](const Tensor& t) {
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(t.bytes());
    int64_t n = 0;
    for (int64_t i = 0; i < t.numel(); ++i) n += (bits[i] & 0xffff) != 0;
    return 2 * n > t.numel();
  };
  for (auto& [name, t] : weights) {
    ASSERT_EQ(t.dtype(), kFloat32) << name;
    EXPECT_TRUE(has_low_bits(t)) << name;
  }
  size_t found = 0;
  for (auto& [name, t] : moments)
    if (name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq")) {
      ASSERT_EQ(t.dtype(), kFloat32) << name;
      EXPECT_TRUE(has_low_bits(t)) << name;
      ++found;
    }
  EXPECT_EQ(found, 2 * weights.size());
}
INSTANTIATE_TEST_SUITE_P(Strategies, Bf16, testing::Values("full_shard", "ddp"),
                         [](const auto& p) { return std::string(p.param); });

}  // namespace
}  // namespace examples
