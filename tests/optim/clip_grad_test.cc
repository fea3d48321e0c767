// Clipping: the same bits however gradients are cut, one collective a group, and odd values.
#include "optim/clip_grad.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <limits>
#include <thread>

#include "autograd/meta.h"
#include "nn/shard_info.h"
#include "optim/optim.h"
#include "tests/optim/support.h"

namespace sherd::optim {
namespace {

using test::bits;
using test::copy_of;
using test::random_tensor;
using test::values;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Ranks that are threads; all must call, in one order.
class FakeGroup {
 public:
  explicit FakeGroup(int size) : barrier_(size), given_(size_t(size)) {}

  void all_reduce(int rank, const Tensor& values, bool max) {
    if (rank == 0) ++calls;
    given_[size_t(rank)] = copy_of(values);
    barrier_.arrive_and_wait();
    int64_t* to = values.data<int64_t>();
    for (size_t r = 0; r < given_.size(); ++r)
      for (int64_t i = 0; i < values.numel(); ++i) {
        const int64_t v = given_[r].data<int64_t>()[i];
        to[i] = r == 0 ? v : max ? std::max(to[i], v) : to[i] + v;
      }
    barrier_.arrive_and_wait();
  }
  std::atomic<int> calls = 0;

 private:
  std::barrier<> barrier_;
  std::vector<Tensor> given_;
};

class FakeShard : public nn::ShardInfo {
 public:
  FakeShard(FakeGroup& group, int rank, Dims shape, int64_t begin, int64_t end)
      : group_(group), rank_(rank), shape_(shape), begin_(begin), end_(end) {}
  Dims full_shape() const override { return shape_; }
  int64_t begin() const override { return begin_; }
  int64_t end() const override { return end_; }
  std::string name() const override { return "w"; }
  const void* group() const override { return &group_; }
  void sum_exact(const Tensor& v) const override { group_.all_reduce(rank_, v, false); }
  void max(const Tensor& v) const override { group_.all_reduce(rank_, v, true); }
  int ranks() const override { return 1; }
  int rank() const override { return 0; }
  std::pair<int64_t, int64_t> part(int) const override { return {begin(), end()}; }
  void all_to_all(const std::vector<Tensor>&, const std::vector<Tensor>&) const override {}

 private:
  FakeGroup& group_;
  int rank_;
  Dims shape_;
  int64_t begin_, end_;
};

Tensor with_grad(const Tensor& g) {
  const Tensor p = zeros(g.sizes(), kFloat32).set_requires_grad();
  p.set_grad(g);
  return p;
}
// Rank's piece [begin, end) of a parameter whose whole gradient is g; none if undefined.
Tensor piece(FakeGroup& group, int rank, const Tensor& g, int64_t begin, int64_t end) {
  const Tensor p = zeros({end - begin}).set_requires_grad();
  autograd::make_meta(p).shard = make_ref<FakeShard>(group, rank, g.sizes(), begin, end);
  if (end > begin)
    p.set_grad(
        copy_of(over_storage(g.storage(), {g.numel()}, g.dtype()).narrow(0, begin, end - begin)));
  return p;
}

// Gradients over many magnitudes, which a plain sum would round in another order differently.
Tensor wild(const Dims& sizes, uint64_t seed) {
  const Tensor g = random_tensor(sizes, seed);
  for (int64_t i = 0; i < g.numel(); ++i)
    g.data<float>()[i] *= std::ldexp(1.f, int(i * 7 % 40) - 20);
  return g;
}

TEST(Sharded, NormAndGradientsHaveTheSameBitsOnEveryCut) {
  const Tensor g[] = {wild({64, 33}, 1), wild({33}, 2), wild({1000}, 3), wild({}, 4)};
  for (double type : {2.0, 1.0, kInfinityNorm, 3.0}) {
    std::vector<Tensor> whole;
    for (auto& x : g) whole.push_back(with_grad(copy_of(x)));
    const Tensor norm = clip_grad_norm_(whole, 2.5, type);
    ASSERT_GT(norm.item(), 2.5);  // so that clipping acts
    for (int ranks : {1, 2, 4, 7}) {
      FakeGroup group(ranks);
      std::vector<std::string> norms(static_cast<size_t>(ranks));
      std::vector<std::vector<Tensor>> clipped(static_cast<size_t>(ranks));
      std::vector<std::jthread> threads;
      for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
          std::vector<Tensor> local;
          // One flat buffer, cut evenly: some ranks have no element of some parameters.
          int64_t total = 0, offset = 0;
          for (auto& x : g) total += x.numel();
          const int64_t c = (total + ranks - 1) / ranks;
          for (auto& x : g) {
            const int64_t lo = std::clamp<int64_t>(r * c - offset, 0, x.numel());
            const int64_t hi = std::clamp<int64_t>((r + 1) * c - offset, 0, x.numel());
            local.push_back(piece(group, r, x, lo, hi));
            offset += x.numel();
          }
          norms[size_t(r)] = bits(clip_grad_norm_(local, 2.5, type));
          clipped[size_t(r)] = local;
        });
      threads.clear();
      EXPECT_EQ(group.calls, 1);
      for (auto& n : norms) EXPECT_EQ(n, bits(norm)) << type << " of " << ranks;
      for (size_t i = 0; i < 4; ++i) {
        std::string joined;
        for (auto& local : clipped)
          if (local[i].numel()) joined += bits(local[i].grad());
        EXPECT_EQ(joined, bits(whole[i].grad())) << type << " of " << ranks << " parameter " << i;
      }
    }
  }
}

TEST(Sharded, GroupsAndWholeParametersCountOnce) {
  const Tensor a = random_tensor({100}, 1), b = random_tensor({60}, 2), c = random_tensor({7}, 3);
  const Tensor expected = clip_coefficient({with_grad(a), with_grad(b), with_grad(c)}, 1).norm;
  FakeGroup first(2), second(2);
  std::vector<std::jthread> threads;
  std::vector<std::string> norms(2);
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      std::vector<Tensor> local{piece(first, r, a, 0, 0), with_grad(copy_of(c)),
                                piece(second, r, b, r * 30, r * 30 + 30),
                                piece(first, r, a, r * 50, r * 50 + 50)};
      norms[size_t(r)] = bits(clip_coefficient(local, 1).norm);
    });
  threads.clear();
  EXPECT_EQ(first.calls, 1);
  EXPECT_EQ(second.calls, 1);
  for (auto& n : norms) EXPECT_EQ(n, bits(expected));
}

// All ranks take part, and agree on value and dtype, where one has no gradient at all.
TEST(Sharded, RanksWithoutGradients) {
  for (double type : {2.0, kInfinityNorm}) {
    FakeGroup group(3);
    const Tensor g = to_raw(random_tensor({90}, 1), kBFloat16);
    std::vector<Tensor> norms(3);
    std::vector<std::jthread> threads;
    for (int r = 0; r < 3; ++r)
      threads.emplace_back([&, r] {
        const Tensor p = piece(group, r, g, 0, r == 1 ? 90 : 0);
        norms[size_t(r)] = clip_coefficient({p}, 1, type).norm;
      });
    threads.clear();
    for (auto& n : norms) {
      EXPECT_EQ(n.dtype(), kBFloat16);
      EXPECT_EQ(bits(n), bits(norms[0]));
      EXPECT_GT(n.item(), 0);
    }
  }
}

TEST(Sharded, NaNAndInfinityReachEveryRank) {
  for (double type : {2.0, 1.0, kInfinityNorm})
    for (double bad : {kInf, kNaN}) {
      FakeGroup group(2);
      std::vector<double> norms(2);
      std::vector<int> refused(2);
      std::vector<std::jthread> threads;
      for (int r = 0; r < 2; ++r)
        threads.emplace_back([&, r] {
          const Tensor g = ones({10});
          if (r == 1) g.data<float>()[9] = float(bad);
          const Tensor p = piece(group, r, g, r * 5, r * 5 + 5);
          norms[size_t(r)] = clip_coefficient({p}, 1, type).norm.item();
          try {
            clip_grad_norm_({p}, 1, type, true);
          } catch (const Error&) {
            refused[size_t(r)] = 1;
          }
        });
      threads.clear();
      for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(std::isnan(norms[size_t(r)]), std::isnan(bad)) << type;
        EXPECT_FALSE(std::isfinite(norms[size_t(r)])) << type;
        EXPECT_EQ(refused[size_t(r)], 1);
      }
    }
}

TEST(Norm, DtypeIsTheGradientsWhereAllAgree) {
  auto norm_of = [](std::vector<DType> dtypes) {
    std::vector<Tensor> params;
    for (DType d : dtypes) params.push_back(with_grad(full({4}, 1, d)));
    return clip_coefficient(params, 1);
  };
  for (DType d : {kFloat16, kBFloat16, kFloat32, kFloat64}) {
    EXPECT_EQ(norm_of({d, d}).norm.dtype(), d);
    EXPECT_EQ(norm_of({d}).norm.item(), 2);
    EXPECT_EQ(norm_of({d}).coefficient.dtype(), d == kFloat64 ? kFloat64 : kFloat32);
  }
  EXPECT_EQ(norm_of({kBFloat16, kFloat32}).norm.dtype(), kFloat32);
  EXPECT_EQ(norm_of({kFloat64, kFloat32}).norm.dtype(), kFloat32);
  EXPECT_EQ(norm_of({}).norm.dtype(), kFloat32);
  EXPECT_EQ(norm_of({}).norm.item(), 0);
  EXPECT_EQ(clip_grad_norm_({ones({3}).set_requires_grad()}, 1).item(), 0);
}

// The coefficient comes from the norm in float32: not from the bfloat16 that is returned, and
// 16-bit gradients are at most max_norm long afterwards, up to their rounding.
TEST(Norm, HalfGradients) {
  for (DType d : {kFloat16, kBFloat16})
    for (double type : {1.0, 2.0, kInfinityNorm})
      for (double most : {1.0, 2.5}) {
        const Tensor g = random_tensor({1000}, 1, d), p = with_grad(copy_of(g));
        const auto clip = clip_coefficient({p}, most, type);
        const double exact =
            clip_coefficient({with_grad(to_raw(g, kFloat32))}, most, type).norm.item();
        EXPECT_NEAR(clip.coefficient.item(), most / (exact + 1e-6), 1e-7);
        clip_grad_norm_({p}, most, type);
        const double after =
            clip_coefficient({with_grad(to_raw(p.grad(), kFloat32))}, most, type).norm.item();
        EXPECT_LE(after, most * (1 + (d == kFloat16 ? 0x1p-11 : 0x1p-8)));
        EXPECT_NE(bits(p.grad()), bits(g));
      }
}

TEST(Norm, SmallGradientsAreLeftAsTheyAre) {
  const Tensor g = random_tensor({30}, 1), p = with_grad(copy_of(g));
  EXPECT_EQ(clip_coefficient({p}, 100).coefficient.item(), 1);
  clip_grad_norm_({p}, 100);
  EXPECT_EQ(bits(p.grad()), bits(g));
}

TEST(Norm, MaxNormZeroAndInfinite) {
  const Tensor p = with_grad(ones({4}));
  EXPECT_EQ(clip_grad_norm_({p}, kInf).item(), 2);
  EXPECT_EQ(values(p.grad()), std::vector<double>(4, 1));
  clip_grad_norm_({p}, 0);
  EXPECT_EQ(values(p.grad()), std::vector<double>(4, 0));
  const Tensor q = with_grad(full({1}, kInf));
  EXPECT_EQ(clip_coefficient({q}, kInf).coefficient.item(), 1);
}

TEST(Norm, NonFiniteAsInPyTorch) {
  Tensor g = ones({3});
  g.data<float>()[1] = float(kInf);
  Tensor p = with_grad(copy_of(g));
  EXPECT_EQ(clip_grad_norm_({p}, 1).item(), kInf);
  EXPECT_EQ(values(p.grad())[0], 0);
  EXPECT_TRUE(std::isnan(values(p.grad())[1]));
  p = with_grad(full({3}, kNaN));
  EXPECT_TRUE(std::isnan(clip_grad_norm_({p}, 1).item()));
  p = with_grad(copy_of(g));
  EXPECT_SAYS(clip_grad_norm_({p}, 1, 2, true), "-norm is inf");
  EXPECT_EQ(bits(p.grad()), bits(g));
  clip_grad_value_({p, with_grad(full({1}, kNaN))}, 0.5);
  EXPECT_EQ(values(p.grad()), (std::vector<double>{0.5, 0.5, 0.5}));
  p = with_grad(full({1}, kNaN));
  clip_grad_value_({p}, 0.5);
  EXPECT_TRUE(std::isnan(values(p.grad())[0]));
}

// The squares of large float32 gradients exceed float32; their norm need not.
TEST(Norm, DoesNotOverflow) {
  const Tensor p = with_grad(full({4}, 1e30));
  EXPECT_FLOAT_EQ(float(clip_grad_norm_({p}, 1).item()), 2e30f);
  EXPECT_NEAR(values(p.grad())[0], 0.5, 1e-6);
}

TEST(Norm, ViewsOfOneBufferAndStrides) {
  const Tensor memory = random_tensor({4, 6}, 1);
  const Tensor expected = clip_coefficient({with_grad(copy_of(memory))}, 1).norm;
  const Tensor p = zeros({6, 4}).set_requires_grad();
  p.set_grad(memory.as_strided_raw({6, 4}, {1, 6}, 0));
  EXPECT_EQ(bits(clip_coefficient({p}, 1).norm), bits(expected));
  clip_grad_norm_({p}, 1);
  EXPECT_NEAR(clip_coefficient({with_grad(copy_of(memory))}, 1).norm.item(), 1, 1e-6);
}

TEST(Norm, RefusesBadArguments) {
  const Tensor p = with_grad(ones({4}));
  EXPECT_SAYS(clip_grad_norm_({p}, -1), "max_norm must be at least 0");
  EXPECT_SAYS(clip_grad_norm_({p}, kNaN), "max_norm");
  EXPECT_SAYS(clip_grad_norm_({p}, 1, 0), "norm_type");
  EXPECT_SAYS(clip_grad_norm_({p}, 1, kNaN), "norm_type");
  EXPECT_SAYS(clip_grad_norm_({p, Tensor()}, 1), "parameter 1 is an undefined tensor");
  EXPECT_SAYS(clip_grad_value_({p}, -1), "clip_value");
  autograd::make_meta(p).name = "layer.w";
  autograd::make_meta(p).grad = ones({2});
  EXPECT_SAYS(clip_grad_norm_({p}, 1), "gradient of layer.w has shape [2], the parameter [4]");
  autograd::make_meta(p).grad = tensor<int64_t>({1, 2, 3, 4});
  EXPECT_SAYS(clip_grad_value_({p}, 1), "gradient of layer.w is int64");
}

// Scaling within the optimizer's kernel gives the bits of scaling the gradients first.
TEST(Coefficient, FusedIntoTheStep) {
  auto train = [](bool fused, auto make) {
    std::vector<Tensor> p{random_tensor({40, 13}, 1).set_requires_grad(),
                          random_tensor({13}, 2).set_requires_grad()};
    auto optimizer = make(p);
    std::string norms;
    for (uint64_t t = 0; t < 4; ++t) {
      for (size_t i = 0; i < 2; ++i)  // clipping acts in some steps only
        p[i].set_grad(to_raw(random_tensor(p[i].sizes(), 10 * t + i), kFloat32));
      const double most = t % 2 ? 1.0 : 1000.0;
      if (fused) {
        const auto clip = clip_coefficient(p, most);
        norms += bits(clip.norm);
        optimizer->step({.grad_scale = clip.coefficient});
      } else {
        norms += bits(clip_grad_norm_(p, most));
        optimizer->step();
      }
    }
    return norms + bits(p[0]) + bits(p[1]);
  };
  auto adam = [](auto& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.1}); };
  auto sgd = [](auto& p) {
    return std::make_unique<SGD>(p, SgdOptions{.momentum = 0.9, .weight_decay = 0.1});
  };
  EXPECT_EQ(train(true, adam), train(false, adam));
  EXPECT_EQ(train(true, sgd), train(false, sgd));
}

}  // namespace
}  // namespace sherd::optim
