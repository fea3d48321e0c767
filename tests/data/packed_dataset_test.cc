// Documents in packed sequences: nothing is lost, nothing is seen across.
#include "data/packed_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "data/data_loader.h"
#include "data/evaluation_dataset.h"
#include "data/sampler.h"
#include "nn/nn.h"

namespace sherd::data {
namespace {

using testing::HasSubstr;
using Documents = std::vector<std::vector<uint16_t>>;

std::vector<int64_t> values(const Tensor& t) {
  return {t.data<int64_t>(), t.data<int64_t>() + t.numel()};
}
std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
Documents random_documents(int count, int longest, uint64_t seed) {
  std::mt19937_64 random(seed);
  Documents documents;
  for (int d = 0; d < count; ++d) {
    auto& tokens = documents.emplace_back(random() % uint64_t(longest + 1));
    for (auto& t : tokens) t = uint16_t(random() % 50);
  }
  return documents;
}

TEST(PackedDataset, EveryPairOfTokensOnceAndDocumentsApart) {
  const Documents documents = random_documents(200, 40, 1);
  const PackedDataset packed(documents, {.sequence_length = 16, .vocab_size = 50});
  std::map<std::pair<int64_t, int64_t>, int> expected, found;
  int64_t places = 0;
  for (auto& d : documents)
    for (size_t i = 0; i + 1 < d.size(); ++i) ++expected[{d[i], d[i + 1]}], ++places;
  for (int64_t i = 0; i < packed.size(); ++i) {
    const Sample s = packed.get(i);
    const auto x = values(s.at("input_ids")), y = values(s.at("labels")),
               id = values(s.at("document_ids")), at = values(s.at("position_ids"));
    for (size_t t = 0; t < 16; ++t) {
      EXPECT_EQ(id[t] < 0, y[t] == -100);
      if (id[t] < 0) continue;
      ++found[{x[t], y[t]}];
      const bool goes_on = t > 0 && id[t] == id[t - 1];
      EXPECT_EQ(at[t], goes_on ? at[t - 1] + 1 : 0);
      if (goes_on) {
        EXPECT_EQ(x[t], y[t - 1]);
      } else {
        EXPECT_EQ(id[t], t == 0 ? 0 : id[t - 1] + 1);
      }
    }
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(packed.fill(), double(places) / double(packed.size() * 16));
  EXPECT_GT(packed.fill(), 0.97);
}

TEST(PackedDataset, CutsARunAtItsEnds) {
  const std::vector<uint16_t> run{5, 6, 0, 7, 0, 0, 8, 9, 1};
  const auto packed = PackedDataset::from_tokens(run, 0, {.sequence_length = 6, .vocab_size = 10});
  ASSERT_EQ(packed.size(), 1);
  const Sample s = packed.get(0);
  EXPECT_EQ(values(s.at("input_ids")), (std::vector<int64_t>{5, 6, 8, 9, 7, 0}));
  EXPECT_EQ(values(s.at("labels")), (std::vector<int64_t>{6, 0, 9, 1, 0, -100}));
  EXPECT_EQ(values(s.at("document_ids")), (std::vector<int64_t>{0, 0, 1, 1, 2, -1}));
  EXPECT_EQ(values(s.at("position_ids")), (std::vector<int64_t>{0, 1, 0, 1, 0, 0}));
}

TEST(PackedDataset, FingerprintIsOfTheDocuments) {
  const PackedOptions options = {.sequence_length = 4};
  const auto of = [&](std::vector<std::vector<uint16_t>> documents) {
    return PackedDataset(std::move(documents), options).fingerprint();
  };
  EXPECT_EQ(of({{1, 2, 3}, {4, 5}}), of({{1, 2, 3}, {4, 5}}));
  EXPECT_NE(of({{1, 2, 3}, {4, 5}}), of({{1, 2, 3}, {4, 6}}));
  EXPECT_NE(of({{1, 2, 3}, {4, 5}}), of({{1, 2}, {3, 4, 5}}));
}

TEST(PackedDataset, Refuses) {
  EXPECT_THAT(message_of([] {
                PackedDataset({{1}, {}}, {.sequence_length = 4});
              }),
              HasSubstr("none of the 2 documents"));
  EXPECT_THAT(message_of([] {
                PackedDataset({{1, 2}, {3, 9, 4}}, {.sequence_length = 4, .vocab_size = 9});
              }),
              HasSubstr("document 1 holds token 9 at position 1"));
  EXPECT_THAT(message_of([] { PackedDataset({{1, 2}}, {}); }), HasSubstr("sequence_length"));
  EXPECT_THAT(message_of([] { visible_documents(zeros({4})); }), HasSubstr("int64"));
}

// Attention over a packed sequence gives each document what it gets alone; backward too.
TEST(PackedDataset, AttentionIsThatOfSingleDocuments) {
  const Documents documents{{1, 2, 3, 4, 5, 6}, {7, 8, 9, 7}, {3, 2, 1}};
  const PackedDataset packed(documents, {.sequence_length = 12, .vocab_size = 10});
  ASSERT_EQ(packed.size(), 1);
  const Sample s = packed.get(0);
  manual_seed(3);
  nn::Embedding embedding(10, 8);
  nn::MultiheadAttention attention(8, 2);
  for (bool causal : {true, false}) {
    const Tensor ids = s.at("input_ids").view({1, 12});
    const Tensor x = nn::call(embedding, ids);
    const Tensor y = nn::call(attention, x, x, x,
                              nn::MultiheadAttentionArguments{
                                  .attn_mask = hidden_documents(s.at("document_ids"), 2, causal)})
                         .output;
    int64_t at = 0;
    for (auto& d : documents) {
      const int64_t n = int64_t(d.size()) - 1;
      const Tensor alone = nn::call(embedding, ids.narrow(1, at, n));
      const Tensor expected = nn::call(attention, alone, alone, alone,
                                       nn::MultiheadAttentionArguments{.is_causal = causal})
                                  .output;
      const Tensor a = expected.contiguous(), b = y.narrow(1, at, n).contiguous();
      for (int64_t i = 0; i < a.numel(); ++i)
        EXPECT_NEAR(a.data<float>()[i], b.data<float>()[i], 1e-5) << causal;
      at += n;
    }
    for (int64_t i = 0; i < y.numel(); ++i)
      EXPECT_TRUE(std::isfinite(y.contiguous().data<float>()[i]));
  }
  // The two masks are each other's opposite.
  const Tensor visible = visible_documents(s.at("document_ids")),
               hidden = hidden_documents(s.at("document_ids"), 1);
  EXPECT_EQ(visible.sizes(), (Dims{1, 1, 12, 12}));
  for (int64_t i = 0; i < 144; ++i) EXPECT_NE(visible.data<bool>()[i], hidden.data<bool>()[i]);
}

// Each sample counts once, and all ranks run as many full batches.
TEST(EvaluationDataset, T_22_EachSampleOnceAtAnyWorldSize) {
  for (int64_t n : {1, 2, 9, 24})
    for (int64_t world : {1, 2, 3, 4})
      for (int64_t batch : {1, 4}) {
        const TensorDataset dataset({{"x", [&] {
                                        Tensor x = empty({n}, kInt64);
                                        for (int64_t i = 0; i < n; ++i) x.data<int64_t>()[i] = i;
                                        return x;
                                      }()}});
        const EvaluationDataset padded(dataset, world * batch);
        std::vector<int> times(static_cast<size_t>(n));
        for (int64_t rank = 0; rank < world; ++rank) {
          DistributedSampler sampler(padded.size(),
                                     {.num_replicas = world, .rank = rank, .shuffle = false});
          DataLoader loader(padded, {.batch_size = batch, .sampler = &sampler});
          EXPECT_EQ(loader.size(), padded.size() / world / batch);
          for (auto& b : loader) {
            ASSERT_EQ(b.at("x").numel(), batch);
            for (int64_t i = 0; i < batch; ++i)
              if (b.at("valid").data<bool>()[i]) ++times[size_t(b.at("x").data<int64_t>()[i])];
          }
        }
        EXPECT_EQ(times, std::vector<int>(static_cast<size_t>(n), 1)) << n << " " << world;
      }
  const TensorDataset one({{"x", zeros({3})}});
  EXPECT_THAT(message_of([&] { EvaluationDataset(one, 0); }), HasSubstr("at least 1"));
  EXPECT_THAT(message_of([&] { EvaluationDataset(one, 2).get(4); }), HasSubstr("there are 4"));
}

}  // namespace
}  // namespace sherd::data
