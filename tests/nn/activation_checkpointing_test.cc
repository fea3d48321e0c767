// Activation checkpointing by module: the same bits, and forwards counted.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "core/generator.h"
#include "nn/nn.h"

namespace sherd::nn {
namespace {

struct Both {
  Tensor first;
  std::optional<Tensor> second;
};

struct BlockArguments {
  double factor = 1;
};
class Block : public Module {
 public:
  using Arguments = BlockArguments;
  Block() : layer(add<Linear>("layer", 4, 4)) {}
  Both forward(const Both& x, const Arguments& arguments = {}) {
    ++calls;
    Tensor h = tanh(layer(x.first)) * arguments.factor;
    if (x.second) h = h + *x.second;
    return {h, x.second ? std::optional<Tensor>(h * 2.0) : std::nullopt};
  }
  Child<Linear> layer;
  int calls = 0;
};
class Stack : public Module {
 public:
  Stack() : blocks(add<ModuleList<Block>>("blocks")) {
    for (int i = 0; i < 4; ++i) blocks->append();
  }
  Tensor forward(const Tensor& x) {
    Both h{x, {}};
    for (int i = 0; i < 4; ++i) {
      h = (*blocks)[i](h, {.factor = 0.5 + i});
      if (i == 1) h.second = h.first;
    }
    return h.first + *h.second;
  }
  Child<ModuleList<Block>> blocks;
};

std::vector<float> gradients(const std::function<bool(Module&)>& check, std::vector<int>& calls) {
  manual_seed(3);
  Stack m;
  apply_activation_checkpointing(m, check);
  Tensor x = randn({2, 4});
  x.set_requires_grad(true);
  call(m, x).sum().backward();
  std::vector<float> all;
  auto take = [&](const Tensor& t) {
    all.insert(all.end(), t.data<float>(), t.data<float>() + t.numel());
  };
  for (auto& p : m.parameters()) take(p.grad());
  take(x.grad());
  for (auto& b : *m.blocks) calls.push_back(b->calls);
  return all;
}

TEST(ActivationCheckpointing, SameBitsWhateverIsChosen) {
  std::vector<int> none, second, all, named;
  const auto plain = gradients([](Module&) { return false; }, none);
  EXPECT_EQ(gradients(every_nth<Block>(2), second), plain);
  EXPECT_EQ(gradients(every_nth<Block>(1), all), plain);
  EXPECT_EQ(gradients([](Module& m) { return m.full_name() == "blocks.0"; }, named), plain);
  EXPECT_EQ(none, (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(second, (std::vector<int>{1, 2, 1, 2}));
  EXPECT_EQ(all, (std::vector<int>{2, 2, 2, 2}));
  EXPECT_EQ(named, (std::vector<int>{2, 1, 1, 1}));
  EXPECT_THROW(every_nth<Block>(0), Error);
}

}  // namespace
}  // namespace sherd::nn
