#include "core/attention.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

struct Sizes {
  int64_t B, H, T, S, D, E;
};
struct Inputs {
  Tensor q, k, v, g;
};
Inputs random_inputs(const Sizes& s, DType d) {
  return {random_tensor({s.B, s.H, s.T, s.D}, 1, d), random_tensor({s.B, s.H, s.S, s.D}, 2, d),
          random_tensor({s.B, s.H, s.S, s.E}, 3, d), random_tensor({s.B, s.H, s.T, s.E}, 4, d)};
}
struct Outputs {
  std::vector<double> y, lse, dq, dk, dv;
};

// Composed from matrices, in float64.
Outputs reference(const Sizes& s, const Inputs& in, const AttentionOptions& o) {
  const auto q = values(in.q), k = values(in.k), v = values(in.v), g = values(in.g);
  Outputs r;
  r.y.resize(g.size()), r.dq.resize(q.size()), r.dk.resize(k.size()), r.dv.resize(v.size());
  std::vector<double> p(static_cast<size_t>(s.S));
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t h = 0; h < s.H; ++h)
      for (int64_t t = 0; t < s.T; ++t) {
        const int64_t head = b * s.H + h;
        const double *qt = &q[(head * s.T + t) * s.D], *ks = k.data() + head * s.S * s.D,
                     *vs = v.data() + head * s.S * s.E, *gt = &g[(head * s.T + t) * s.E];
        double top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < s.S; ++i) {
          double x = 0;
          for (int64_t c = 0; c < s.D; ++c) x += qt[c] * ks[i * s.D + c];
          x *= o.scale;
          if (o.causal && i > t) x = -INFINITY;
          if (o.mask.defined()) {
            const Dims& m = o.mask.sizes();
            const Tensor one = o.mask.as_strided_raw({}, {},
                                                     o.mask.storage_offset() +
                                                         (m[0] == 1 ? 0 : b) * o.mask.stride(0) +
                                                         (m[1] == 1 ? 0 : h) * o.mask.stride(1) +
                                                         (m[2] == 1 ? 0 : t) * o.mask.stride(2) +
                                                         (m[3] == 1 ? 0 : i) * o.mask.stride(3));
            const double value = one.item<double>();
            x += o.mask.dtype() == kBool ? (value != 0 ? 0 : -INFINITY) : value;
          }
          p[i] = x;
          top = std::max(top, x);
        }
        if (top == -INFINITY) {
          r.lse.push_back(-INFINITY);
          continue;
        }
        for (auto& x : p) sum += std::exp(x - top);
        for (auto& x : p) x = std::exp(x - top) / sum;
        r.lse.push_back(top + std::log(sum));
        double delta = 0;
        for (int64_t e = 0; e < s.E; ++e) {
          double y = 0;
          for (int64_t i = 0; i < s.S; ++i) y += p[i] * vs[i * s.E + e];
          r.y[(head * s.T + t) * s.E + e] = y;
          delta += y * gt[e];
        }
        for (int64_t i = 0; i < s.S; ++i) {
          double dp = 0;
          for (int64_t e = 0; e < s.E; ++e) {
            dp += gt[e] * vs[i * s.E + e];
            r.dv[(head * s.S + i) * s.E + e] += p[i] * gt[e];
          }
          const double ds = o.scale * p[i] * (dp - delta);
          for (int64_t c = 0; c < s.D; ++c) {
            r.dq[(head * s.T + t) * s.D + c] += ds * ks[i * s.D + c];
            r.dk[(head * s.S + i) * s.D + c] += ds * qt[c];
          }
        }
      }
  return r;
}

struct Results {
  Tensor y, lse, dq, dk, dv;
  std::vector<Tensor> all() const { return {y, lse, dq, dk, dv}; }
};
Results run(const Sizes& s, const Inputs& in, const AttentionOptions& o) {
  const DType d = in.q.dtype(), wide = d == kFloat64 ? kFloat64 : kFloat32;
  const double nan = std::nan("");
  Results r{full({s.B, s.H, s.T, s.E}, nan, d), full({s.B, s.H, s.T}, nan, wide),
            full(in.q.sizes(), nan, d), full(in.k.sizes(), nan, d), full(in.v.sizes(), nan, d)};
  attention_forward(kCPU, d)(in.q, in.k, in.v, o, r.y, r.lse);
  attention_backward(kCPU, d)(in.g, in.q, in.k, in.v, r.y, r.lse, o, r.dq, r.dk, r.dv);
  return r;
}
void expect_reference(const Sizes& s, const Inputs& in, const AttentionOptions& o, const Results& r,
                      const std::string& what) {
  const Outputs want = reference(s, in, o);
  const DType d = in.q.dtype();
  // A score sums D products; a 16-bit y is rounded before backward reads it.
  const double t = epsilon(d == kFloat64 ? d : kFloat32) * double(s.D + s.S + 60), out = epsilon(d),
               sums = d == kFloat64 ? t : t + (d == kFloat32 ? 0 : epsilon(d) * double(s.E) / 4);
  expect_close(r.y, want.y, out + t, t, what + " y");
  expect_close(r.lse, want.lse, t, t, what + " lse");
  expect_close(r.dq, want.dq, out + t, sums, what + " dq");
  expect_close(r.dk, want.dk, out + t, sums * std::sqrt(double(s.T)), what + " dk");
  expect_close(r.dv, want.dv, out + t, t * std::sqrt(double(s.T)), what + " dv");
}

const Sizes kSizes[] = {{1, 1, 1, 1, 1, 1},    {2, 3, 7, 11, 4, 4},     {1, 2, 53, 53, 8, 8},
                        {2, 2, 16, 101, 5, 7}, {1, 1, 101, 16, 33, 3},  {1, 2, 130, 130, 64, 64},
                        {3, 1, 1, 70, 16, 16}, {1, 1, 65, 129, 128, 20}};

TEST(Attention, IsTheReference) {
  for (const Sizes& s : kSizes)
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16})
      for (bool causal : {false, true}) {
        const Inputs in = random_inputs(s, d);
        const AttentionOptions o{.causal = causal, .scale = 1 / std::sqrt(double(s.D)), .mask = {}};
        expect_reference(s, in, o, run(s, in, o),
                         concat(name_of(d), " T ", s.T, " S ", s.S, " causal ", causal));
      }
}

TEST(Attention, Masks) {
  for (const Sizes& s : {Sizes{2, 3, 7, 11, 4, 4}, Sizes{2, 2, 70, 90, 16, 16}})
    for (DType d : {kFloat32, kFloat64}) {
      const Inputs in = random_inputs(s, d);
      for (const Dims& shape : {Dims{1, 1, s.T, s.S}, Dims{s.B, 1, 1, s.S},
                                Dims{s.B, s.H, s.T, s.S}, Dims{1, s.H, s.T, 1}})
        for (DType mask_type : {kFloat32, kBool}) {
          Tensor mask = random_tensor(shape, 5, kFloat32, -2, 2);
          if (mask_type == kBool) {  // about three quarters stay visible
            std::vector<double> v = values(mask);
            for (auto& x : v) x = x > -1;
            mask = from_values(v, shape, kBool);
          }
          const AttentionOptions o{.causal = false, .scale = 0.5, .mask = mask};
          expect_reference(s, in, o, run(s, in, o), concat(name_of(mask_type), " ", shape));
        }
    }
}

TEST(Attention, QueriesThatSeeNothingGiveZeros) {
  const Sizes s{1, 2, 5, 70, 4, 4};
  const Inputs in = random_inputs(s, kFloat32);
  std::vector<double> m(size_t(s.T * s.S), 0.0);
  for (int64_t i = 0; i < s.S; ++i) m[size_t(2 * s.S + i)] = -INFINITY;
  for (int64_t i = 0; i < 65; ++i) m[size_t(3 * s.S + i)] = -INFINITY;  // the whole first block
  const AttentionOptions o{.scale = 0.5, .mask = from_values(m, {1, 1, s.T, s.S}, kFloat32)};
  const Results r = run(s, in, o);
  expect_reference(s, in, o, r, "hidden");
  const auto y = values(r.y), lse = values(r.lse);
  for (int64_t e = 0; e < s.E; ++e) EXPECT_EQ(y[size_t(2 * s.E + e)], 0);
  EXPECT_EQ(lse[2], -INFINITY);
}

// q, k, v and their gradients as views of one projection [B, T, 3 C], y as [B, T, H, E].
TEST(Attention, RunsOnThePackedProjection) {
  for (DType d : {kFloat32, kBFloat16})
    for (int64_t D : {16, 12}) {
      const Sizes s{2, 3, 75, 75, D, D};
      const int64_t C = s.H * D;
      const Tensor packed = random_tensor({s.B, s.T, 3 * C}, 1, d),
                   dpacked = empty({s.B, s.T, 3 * C}, d);
      auto part = [&](const Tensor& t, int64_t which) {
        return t.as_strided_raw({s.B, s.H, s.T, D}, {s.T * 3 * C, D, 3 * C, 1}, which * C);
      };
      auto joined = [&](const Tensor& t) {
        return t.as_strided_raw({s.B, s.H, s.T, D}, {s.T * C, D, C, 1}, 0);
      };
      const Tensor y = joined(empty({s.B, s.T, C}, d)),
                   g = joined(random_tensor({s.B, s.T, C}, 2, d)), lse = empty({s.B, s.H, s.T});
      const AttentionOptions o{.causal = true, .scale = 0.25, .mask = {}};
      attention_forward(kCPU, d)(part(packed, 0), part(packed, 1), part(packed, 2), o, y, lse);
      attention_backward(kCPU, d)(g, part(packed, 0), part(packed, 1), part(packed, 2), y, lse, o,
                                  part(dpacked, 0), part(dpacked, 1), part(dpacked, 2));
      const Inputs in{contiguous_raw(part(packed, 0)), contiguous_raw(part(packed, 1)),
                      contiguous_raw(part(packed, 2)), contiguous_raw(g)};
      const Results apart = run(s, in, o);
      EXPECT_TRUE(same_bits(y, apart.y) && same_bits(lse, apart.lse));
      EXPECT_TRUE(same_bits(part(dpacked, 0), apart.dq) && same_bits(part(dpacked, 1), apart.dk) &&
                  same_bits(part(dpacked, 2), apart.dv));
    }
}

TEST(Attention, OtherStrides) {
  const Sizes s{2, 2, 20, 30, 16, 16};
  const Inputs in = random_inputs(s, kFloat32);
  const AttentionOptions o{.causal = true, .scale = 0.25, .mask = {}};
  const Results want = run(s, in, o);
  const Inputs strided{transposed_layout(in.q), transposed_layout(in.k), transposed_layout(in.v),
                       transposed_layout(in.g)};
  const Results got = run(s, strided, o);
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(same_bits(want.all()[i], got.all()[i])) << i;
  // Keys and values shared by all heads.
  const Tensor k = in.k.as_strided_raw(in.k.sizes(), {in.k.stride(0), 0, in.k.stride(2), 1}, 0),
               v = in.v.as_strided_raw(in.v.sizes(), {in.v.stride(0), 0, in.v.stride(2), 1}, 0);
  const Inputs shared{in.q, k, v, in.g};
  expect_reference(s, shared, o, run(s, shared, o), "shared");
}

TEST(Attention, NaNReachesWhatSawIt) {
  const Sizes s{1, 1, 6, 6, 4, 4};
  const Inputs in = random_inputs(s, kFloat32);
  in.k.data<float>()[3 * 4] = NAN;  // key 3
  const Results r = run(s, in, {.causal = true, .scale = 1, .mask = {}});
  const auto y = values(r.y);
  for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(std::isnan(y[size_t(t * 4)]), t >= 3) << t;
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Sizes s{1, 1, 70, 140, 8, 8};
  Inputs in = random_inputs(s, kFloat32);
  in.q = random_tensor(in.q.sizes(), 1, kFloat32, -300, 300);
  const AttentionOptions o{.scale = 1, .mask = {}};
  const Results r = run(s, in, o);
  // Scores of some thousand are known to 2e-4, and so is the logarithm of a probability.
  expect_close(r.y, reference(s, in, o).y, 1e-2, 1e-3);
}

TEST(Attention, Empty) {
  const AttentionOptions o;
  for (const Sizes& s :
       {Sizes{0, 2, 3, 3, 4, 4}, Sizes{1, 2, 0, 3, 4, 4}, Sizes{1, 2, 3, 0, 4, 4}}) {
    const Results r = run(s, random_inputs(s, kFloat32), o);
    for (const Tensor& t : {r.y, r.dq, r.dk, r.dv})
      expect_close(t, std::vector<double>(size_t(t.numel()), 0.0), 0, 0);
  }
}

TEST(Attention, SameBitsEverywhere) {
  for (DType d : {kFloat32, kBFloat16})
    for (const Sizes& s : {Sizes{2, 3, 130, 130, 64, 64}, Sizes{2, 2, 33, 75, 20, 12}}) {
      const Inputs in = random_inputs(s, d);
      const AttentionOptions o{.causal = true, .scale = 0.125, .mask = {}};
      expect_same_bits_everywhere([&] { return run(s, in, o).all(); }, name_of(d));
      const Inputs moved{shifted(in.q), shifted(in.k), shifted(in.v), shifted(in.g)};
      const auto a = run(s, in, o).all(), b = run(s, moved, o).all();
      for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << "shifted " << i;
    }
}

}  // namespace
}  // namespace sherd
