// Printing modules. The expected texts are PyTorch 2.15's, but for the class of attention's
// out_proj, a Linear by another name there.
#include "nn/print.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "nn/nn.h"

namespace sherd {
namespace {

class Block : public nn::Module {
 public:
  Block()
      : layer_norm(add<nn::LayerNorm>("layer_norm", 16)),
        attention(add<nn::MultiheadAttention>("attention", 16, 8)),
        ffn(add<nn::Sequential>("ffn", nn::Linear(16, 64), nn::ReLU(),
                                nn::Linear(64, 16, {.bias = false}))) {}
  nn::Child<nn::LayerNorm> layer_norm;
  nn::Child<nn::MultiheadAttention> attention;
  nn::Child<nn::Sequential> ffn;
};

template <class T>
class Model : public nn::Module {
 public:
  Model()
      : embedding(add<nn::Embedding>("embedding", 97, 16)),
        blocks(add<nn::ModuleList<T>>("blocks")),
        other(add<nn::ModuleList<nn::GELU>>("other")),
        empty(add<nn::ModuleList<T>>("empty")),
        dropout(add<nn::Dropout>("dropout", 0.1)) {
    blocks->append();
    blocks->append();
    for (const char* kind : {"none", "none", "tanh"}) other->append(kind);
  }
  std::string extra_repr() const override { return "width=16"; }
  nn::Child<nn::Embedding> embedding;
  nn::Child<nn::ModuleList<T>> blocks;
  nn::Child<nn::ModuleList<nn::GELU>> other;
  nn::Child<nn::ModuleList<T>> empty;
  nn::Child<nn::Dropout> dropout;
};

TEST(Print, ATreeIsPyTorchs) {
  std::ostringstream out;
  out << Model<Block>();
  EXPECT_EQ(out.str(), R"(Model(
  width=16
  (embedding): Embedding(97, 16)
  (blocks): ModuleList(
    (0-1): 2 x Block(
      (layer_norm): LayerNorm((16,), eps=1e-05, elementwise_affine=True, bias=True)
      (attention): MultiheadAttention(
        (out_proj): Linear(in_features=16, out_features=16, bias=True)
      )
      (ffn): Sequential(
        (0): Linear(in_features=16, out_features=64, bias=True)
        (1): ReLU()
        (2): Linear(in_features=64, out_features=16, bias=False)
      )
    )
  )
  (other): ModuleList(
    (0-1): 2 x GELU(approximate='none')
    (2): GELU(approximate='tanh')
  )
  (empty): ModuleList()
  (dropout): Dropout(p=0.1, inplace=False)
))");
}

TEST(Print, OptionsArePyTorchs) {
  using nn::to_string;
  EXPECT_EQ(to_string(nn::LayerNorm({3, 4}, {.eps = 1e-3, .elementwise_affine = false})),
            "LayerNorm((3, 4), eps=0.001, elementwise_affine=False, bias=False)");
  EXPECT_EQ(to_string(nn::LayerNorm(3, {.bias = false})),
            "LayerNorm((3,), eps=1e-05, elementwise_affine=True, bias=False)");
  EXPECT_EQ(to_string(nn::Embedding(3, 4, {.padding_idx = -2})), "Embedding(3, 4, padding_idx=1)");
  EXPECT_EQ(to_string(nn::Dropout(1)), "Dropout(p=1.0, inplace=False)");
  // Neighbours in a Sequential are not counted, as they are not there.
  EXPECT_EQ(to_string(nn::Sequential(nn::ReLU(), nn::ReLU())),
            "Sequential(\n  (0): ReLU()\n  (1): ReLU()\n)");
  class Local : public nn::Module {};
  EXPECT_EQ(to_string(Local()), "Local()");
}

TEST(Print, NumbersArePythons) {
  EXPECT_EQ(nn::repr(0.1), "0.1");
  EXPECT_EQ(nn::repr(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(nn::repr(0.0001), "0.0001");
  EXPECT_EQ(nn::repr(1e-12), "1e-12");
  EXPECT_EQ(nn::repr(0.0), "0.0");
  EXPECT_EQ(nn::repr(10.0), "10.0");
  EXPECT_EQ(nn::repr(-150.25), "-150.25");
  EXPECT_EQ(nn::repr(123456789.0), "123456789.0");
  EXPECT_EQ(nn::repr(1e15), "1000000000000000.0");
  EXPECT_EQ(nn::repr(1e16), "1e+16");
  EXPECT_EQ(nn::repr(INFINITY), "inf");
}

}  // namespace
}  // namespace sherd
