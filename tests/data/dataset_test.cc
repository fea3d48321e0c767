#include "data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<float> values(const Tensor& x) {
  const Tensor y = contiguous_raw(x);
  return {y.data<float>(), y.data<float>() + y.numel()};
}

TEST(Batch, KeepsOrderAndNamesWhatItHolds) {
  Batch batch = {{"labels", tensor<float>({1})}, {"ids", tensor<float>({2})}};
  batch.set("mask", tensor<float>({3}));
  batch.set("labels", tensor<float>({4}));
  std::vector<std::string> names;
  for (const auto& [name, tensor] : batch) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("labels", "ids", "mask"));
  EXPECT_THAT(values(batch.at("labels")), ElementsAre(4));
  EXPECT_TRUE(batch.contains("ids"));
  EXPECT_FALSE(batch.contains("id"));
  EXPECT_THAT(message_of<Error>([&] { batch.at("id"); }),
              AllOf(HasSubstr("'id'"), HasSubstr("'labels', 'ids', 'mask'")));
  EXPECT_THAT(message_of<Error>([] {
                Batch{{"x", Tensor(1)}, {"x", Tensor(2)}};
              }),
              HasSubstr("'x'"));
}

TEST(StackSamples, StacksEveryName) {
  const std::vector<Sample> samples = {
      {{"x", tensor<float>({1, 2})}, {"y", tensor<int64_t>({7})}},
      {{"y", tensor<int64_t>({8})}, {"x", tensor<float>({3, 4})}}};  // names in another order
  const Batch batch = stack_samples(samples, {0, 1});
  EXPECT_EQ(batch.at("x").sizes(), Dims({2, 2}));
  EXPECT_THAT(values(batch.at("x")), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(batch.at("y").dtype(), kInt64);
  EXPECT_EQ(batch.begin()->first, "x");
}

TEST(StackSamples, TakesScalarsEmptyAndStridedTensors) {
  const Tensor matrix = tensor<float>(std::vector<float>{1, 2, 3, 4, 5, 6});
  const Tensor column = matrix.as_strided_raw({3}, {2}, 0);  // 1 3 5
  const Batch batch = stack_samples({{{"s", full({}, 1)}, {"e", empty({0, 2})}, {"c", column}},
                                     {{"s", full({}, 2)}, {"e", empty({0, 2})}, {"c", column}}},
                                    {0, 1});
  EXPECT_EQ(batch.at("s").sizes(), Dims({2}));
  EXPECT_THAT(values(batch.at("s")), ElementsAre(1, 2));
  EXPECT_EQ(batch.at("e").sizes(), Dims({2, 0, 2}));
  EXPECT_THAT(values(batch.at("c")), ElementsAre(1, 3, 5, 1, 3, 5));
}

TEST(StackSamples, NamesBothSamplesThatDiffer) {
  const Sample two = {{"x", empty({2})}}, three = {{"x", empty({3})}};
  const auto message = [](std::vector<Sample> samples) {
    return message_of<Error>([&] { stack_samples(samples, {4, 5, 6}); });
  };
  EXPECT_THAT(message({two, two, three}),
              AllOf(HasSubstr("'x'"), HasSubstr("[2] in sample 4"), HasSubstr("[3] in sample 6"),
                    HasSubstr("collate_fn")));
  EXPECT_THAT(message({two, {{"x", empty({2}, kInt64)}}, two}),
              AllOf(HasSubstr("float32"), HasSubstr("int64"), HasSubstr("sample 5")));
  EXPECT_THAT(message({two, {{"y", empty({2})}}, two}),
              AllOf(HasSubstr("samples 4 and 5"), HasSubstr("'y'")));
  EXPECT_THAT(message({two, {{"x", empty({2})}, {"y", empty({2})}}, two}), HasSubstr("'y'"));
  EXPECT_THAT(message({two, {{"x", Tensor()}}, two}), HasSubstr("undefined"));
  EXPECT_THAT(message_of<Error>([] { stack_samples({}, {}); }), HasSubstr("at least one"));
}

TEST(TensorDataset, GivesRows) {
  Tensor x = tensor<float>(std::span<const float>(std::vector<float>{1, 2, 3, 4, 5, 6}), {3, 2});
  const TensorDataset dataset({{"x", x}, {"y", tensor<int64_t>({7, 8, 9})}});
  EXPECT_EQ(dataset.size(), 3);
  EXPECT_THAT(values(dataset.get(1).at("x")), ElementsAre(3, 4));
  EXPECT_EQ(dataset.get(2).at("y").item<int64_t>(), 9);
  EXPECT_EQ(dataset.get(2).at("y").dim(), 0);
  const TensorDataset transposed({{"x", x.as_strided_raw({2, 3}, {1, 2}, 0)}});
  EXPECT_THAT(values(transposed.get(1).at("x")), ElementsAre(2, 4, 6));
}

TEST(TensorDataset, Refuses) {
  EXPECT_THAT(message_of<Error>([] {
                TensorDataset({{"x", empty({3})}, {"y", empty({4, 1})}});
              }),
              AllOf(HasSubstr("'x' holds 3"), HasSubstr("'y' 4")));
  EXPECT_THAT(message_of<Error>([] { TensorDataset({{"x", full({}, 1)}}); }), HasSubstr("'x'"));
  EXPECT_THAT(message_of<Error>([] { TensorDataset(Batch{}); }), HasSubstr("at least one"));
  const TensorDataset three({{"x", empty({3})}});
  for (int64_t i : {-1, 3})
    EXPECT_THAT(message_of<Error>([&] { three.get(i); }), HasSubstr("there are 3"));
}

}  // namespace
}  // namespace sherd::data
