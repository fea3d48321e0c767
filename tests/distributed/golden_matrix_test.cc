// PyTorch's training runs (tests/goldens) at every number of ranks that divides their batch, for
// every strategy, way of wrapping, prefetching and backend. Here a choice in which every pair of
// values meets; SHERD_TEST_ALL=1 tries all.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/safetensors.h"
#include "examples/big_model.h"
#include "tests/distributed/spawn.h"

namespace examples {
namespace {

using namespace sherd;

constexpr const char* kCases[] = {"bigmodel_tiny", "bigmodel_odd", "bigmodel_no_mask",
                                  "bigmodel_wide_batch"};
constexpr int kRanks[] = {1, 2, 3, 4, 8};
constexpr const char* kStrategies[] = {"ddp",      "full_shard",   "shard_grad_op",
                                       "no_shard", "hybrid_shard", "hybrid_shard_zero2"};
constexpr const char* kWraps[] = {"by_type", "by_size", "nested", "root"};
constexpr BackwardPrefetch kPrefetches[] = {BackwardPrefetch::kPre, BackwardPrefetch::kPost,
                                            BackwardPrefetch::kNone};
constexpr const char* kBackends[] = {"shm", "gloo", "mpi"};

// Places in the lists above, and the number of forward prefetches.
enum Axis { kCase, kRank, kStrategy, kWrap, kPrefetch, kForward, kBackend, kAxes };
using Combination = std::array<int, kAxes>;

struct Golden {
  nlohmann::json trace;
  std::map<std::string, Tensor> start, end;
  std::vector<uint16_t> tokens;
};
const Golden& golden(int which) {
  static const std::vector<Golden> all = [] {
    std::vector<Golden> result;
    for (const char* name : kCases) {
      const std::string folder = concat("tests/goldens/", name);
      Golden g;
      g.trace = nlohmann::json::parse(std::ifstream(folder + "/trace.json"));
      g.start = load_safetensors(folder + "/init.safetensors");
      g.end = load_safetensors(folder + "/final.safetensors");
      std::ifstream in(folder + "/tokens.bin", std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(in), {}};
      g.tokens.resize(bytes.size() / 2);
      std::memcpy(g.tokens.data(), bytes.data(), bytes.size());
      result.push_back(std::move(g));
    }
    return result;
  }();
  return all[size_t(which)];
}

std::string describe(const Combination& r) {
  return concat(kCases[r[kCase]], "_", kRanks[r[kRank]], "_ranks_", kStrategies[r[kStrategy]], "_",
                kWraps[r[kWrap]], "_backward_", r[kPrefetch], "_forward_", r[kForward], "_",
                kBackends[r[kBackend]]);
}

std::vector<Combination> all_runs() {
  std::vector<Combination> runs;
  for (int c = 0; c < 4; ++c)
    for (int n = 0; n < 5; ++n)
      for (int s = 0; s < 6; ++s)
        for (int w = 0; w < 4; ++w)
          for (int p = 0; p < 3; ++p)
            for (int f = 0; f < 2; ++f)
              for (int b = 0; b < 3; ++b) {
                const bool divides = golden(c).trace["config"]["batch"].get<int>() % kRanks[n] == 0;
                const bool hybrid = s >= 4, ddp = s == 0;
                if (!divides || (hybrid && kRanks[n] < 4)) continue;
                if (ddp && (w || p || f)) continue;  // it has neither units nor prefetches
                runs.push_back({c, n, s, w, p, f, b});
              }
  return runs;
}

// A choice with every pair of values that some run has: always the run with the most new pairs.
std::vector<Combination> pairwise(const std::vector<Combination>& all) {
  using Pair = std::array<int, 4>;  // two axes, and the values there
  auto pairs_of = [](const Combination& r) {
    std::vector<Pair> pairs;
    for (int a = 0; a < kAxes; ++a)
      for (int b = a + 1; b < kAxes; ++b) pairs.push_back({a, r[size_t(a)], b, r[size_t(b)]});
    return pairs;
  };
  std::set<Pair> open;
  for (auto& r : all)
    for (auto& p : pairs_of(r)) open.insert(p);
  std::vector<Combination> chosen;
  while (!open.empty()) {
    auto fresh = [&](const Combination& r) {
      return std::ranges::count_if(pairs_of(r), [&](const Pair& p) { return open.contains(p); });
    };
    const Combination best = *std::ranges::max_element(all, {}, fresh);
    for (auto& p : pairs_of(best)) open.erase(p);
    chosen.push_back(best);
  }
  return chosen;
}

const std::vector<Combination>& tried_runs() {
  static const std::vector<Combination> runs =
      std::getenv("SHERD_TEST_ALL") ? all_runs() : pairwise(all_runs());
  return runs;
}

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> weights;
};

// One rank's training.
class Training {
 public:
  explicit Training(const Combination& run)
      : run_(run),
        config_(golden(run[kCase]).trace["config"]),
        model_(config_["layers"], config_["dim"], config_["ff_dim"], config_["vocab"],
               {.heads = config_["heads"], .causal = config_["causal"]}) {
    nn::StateDict start;
    for (auto& [name, t] : golden(run[kCase]).start) start.set(name, t);
    model_.load_state_dict(start);
    if (run[kStrategy] == 0)
      ddp_.emplace(model_,
                   DdpOptions{.bucket_cap_mb = 20000.0 / (1 << 20), .first_bucket_bytes = 2000});
    else
      shard();
  }

  Outcome train() {
    Outcome result;
    optim::AdamW optimizer(model_.parameters(),
                           {.lr = config_["lr"], .weight_decay = config_["weight_decay"]});
    const int64_t accumulate = config_["accumulate"], batch = config_["batch"];
    int64_t sample = 0;
    for (int64_t step = 0; step < config_["steps"].get<int64_t>(); ++step) {
      Tensor total = zeros({}, kFloat64);
      for (int64_t micro = 0; micro < accumulate; ++micro, sample += batch) {
        std::optional<FsdpModule::NoSync> fsdp_waits;
        std::optional<DistributedDataParallel<BigModel>::NoSync> ddp_waits;
        if (micro + 1 < accumulate && fsdp_) fsdp_waits.emplace(fsdp_->runtime());
        if (micro + 1 < accumulate && ddp_) ddp_waits.emplace(ddp_->reducer());
        const Tensor loss = loss_of(sample) / double(accumulate);
        loss.backward();
        total.add_(loss.detach().to(kFloat64));
      }
      dist::all_reduce(total, dist::ReduceOp::kAvg);
      result.losses.push_back(total.item());
      const double max_norm = config_["max_norm"];
      result.norms.push_back(optim::clip_grad_norm_(model_.parameters(), max_norm).item());
      optimizer.step();
      optimizer.zero_grad();
    }
    const nn::StateDict state = fsdp_ ? fsdp_->full_state_dict() : model_.state_dict();
    if (dist::rank() == 0)
      for (auto& [name, t] : state) {
        const Tensor c = contiguous_raw(t);
        result.weights[name] = {c.data<float>(), c.data<float>() + c.numel()};
      }
    return result;
  }

 private:
  void shard() {
    FsdpOptions o;
    o.sharding_strategy = sharding_strategy(kStrategies[run_[kStrategy]]);
    o.backward_prefetch = kPrefetches[run_[kPrefetch]];
    o.forward_prefetch = run_[kForward];
    if (is_hybrid(o.sharding_strategy))
      o.device_mesh = dist::init_device_mesh({2, dist::world_size() / 2}, {"replicate", "shard"});
    const std::string wrap = kWraps[run_[kWrap]];
    if (wrap == "by_type") o.auto_wrap_policy = module_wrap_policy<LargeTransformerBlock>();
    if (wrap == "by_size") o.auto_wrap_policy = size_based_auto_wrap_policy(2000);
    if (wrap == "nested")
      for (auto& layer : *model_.layers) FsdpModule(*layer->ffn, o), FsdpModule(*layer, o);
    fsdp_.emplace(model_, o);
  }

  // The mean over this rank's samples of the global batch that begins there: rank r of W has those
  // whose index is r modulo W.
  Tensor loss_of(int64_t sample) const {
    const int64_t T = config_["seq"], rank = dist::rank(), world = dist::world_size(),
                  B = config_["batch"].get<int64_t>() / world;
    const Tensor ids = empty({B, T}, kInt64), labels = empty({B, T}, kInt64);
    for (int64_t i = 0; i < B; ++i)
      for (int64_t t = 0; t < T; ++t) {
        const size_t at = size_t((sample + i * world + rank) * T + t);
        ids.data<int64_t>()[i * T + t] = golden(run_[kCase]).tokens[at];
        labels.data<int64_t>()[i * T + t] = golden(run_[kCase]).tokens[at + 1];
      }
    const int64_t V = config_["vocab"];
    return F::cross_entropy(nn::call(model_, ids).view({-1, V}), labels.view({-1}));
  }

  const Combination& run_;
  const nlohmann::json& config_;
  mutable BigModel model_;
  std::optional<FullyShardedDataParallel<BigModel>> fsdp_;
  std::optional<DistributedDataParallel<BigModel>> ddp_;
};

void compare(const Outcome& got, const Golden& expected) {
  const auto& steps = expected.trace["steps"];
  ASSERT_EQ(got.losses.size(), steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const double loss = steps[i]["loss"], norm = steps[i]["grad_norm"];
    EXPECT_NEAR(got.losses[i], loss, 2e-5 * loss) << "step " << i + 1;
    EXPECT_NEAR(got.norms[i], norm, 2e-4 * norm) << "step " << i + 1;
  }
  ASSERT_EQ(got.weights.size(), expected.end.size());
  for (auto& [name, e] : expected.end) {
    const std::vector<float>& w = got.weights.at(name);
    const size_t n = size_t(e.numel());
    ASSERT_EQ(w.size(), n) << name;
    // The true gradient of the keys' bias is zero: see the goldens' README.
    const bool in_proj_bias = name.ends_with("in_proj_bias");
    for (size_t i = 0; i < n; ++i)
      ASSERT_NEAR(w[i], e.data<float>()[i], in_proj_bias && i / (n / 3) == 1 ? 5e-3 : 2e-4)
          << name << " element " << i;
  }
}

// Rank 0 writes what it has into a file.
Outcome train_processes(const Combination& run) {
  const std::string path = testing::TempDir() + concat("outcome_", getpid());
  dist::run_processes(
      kRanks[run[kRank]],
      [&](int rank) {
        const Outcome mine = Training(run).train();
        if (rank != 0) return;
        const auto bytes =
            nlohmann::json::to_cbor(nlohmann::json::array({mine.losses, mine.norms, mine.weights}));
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
      },
      {.timeout = std::chrono::seconds(60),
       .kill_after = std::chrono::seconds(250),
       .backend = kBackends[run[kBackend]]});
  std::ifstream in(path, std::ios::binary);
  const auto read = nlohmann::json::from_cbor(in);
  std::filesystem::remove(path);
  return {read[0], read[1], read[2]};
}

class GoldenMatrix : public testing::TestWithParam<Combination> {};

TEST_P(GoldenMatrix, SameNumbersAsPyTorch) {
  const Combination& run = GetParam();
  const bool mpi = kBackends[run[kBackend]] == std::string("mpi");
  if (mpi && !dist::why_no_mpi().empty()) GTEST_SKIP() << dist::why_no_mpi();
  golden(0);  // read before there are threads
  Outcome outcome;
  if (mpi) {
    outcome = train_processes(run);
  } else {
    dist::run_ranks(kRanks[run[kRank]],
                    [&](int rank) {
                      Outcome mine = Training(run).train();
                      if (rank == 0) outcome = std::move(mine);
                    },
                    {.timeout = std::chrono::seconds(60), .backend = kBackends[run[kBackend]]});
  }
  compare(outcome, golden(run[kCase]));

  // At one number of ranks all runs end in the same bits, whatever the strategy and the backend.
  static std::map<std::pair<int, int>, std::pair<std::string, Outcome>> firsts;
  const auto [first, is_first] =
      firsts.try_emplace({run[kCase], run[kRank]}, describe(run), outcome);
  EXPECT_TRUE(is_first || outcome.weights == first->second.second.weights)
      << "weights differ from those of " << first->second.first;
}

INSTANTIATE_TEST_SUITE_P(BigModel, GoldenMatrix, testing::ValuesIn(tried_runs()),
                         [](const auto& p) { return describe(p.param); });

}  // namespace
}  // namespace examples
