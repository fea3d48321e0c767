// The test table: one row an op, and the row alone gives it all the tests of op_table_test.cc:
// values against a reference in float64, both derivatives (fused and composed) and their
// derivatives, layouts, dtypes, threads and instruction sets, the meta device, special values,
// in-place and out forms, errors.
//
//     rows.push_back({.name = "softmax",
//                     .f = [](const Inputs& t) { return softmax(t[0], 1); },
//                     .reference = [](const Inputs& t) { return build(t[0].sizes(), ...); },
//                     .samples = {{{2, 3, 4}}, {{0, 3}}},
//                     .large = {{{700, 900}}}});
#pragma once
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sherd::test {

using Inputs = std::vector<Tensor>;
using Function = std::function<Tensor(const Inputs&)>;

// How to draw an input: float64 uniform in [low, high), int64 below `below`, bool, or none.
struct In {
  enum Kind { kReal, kIndex, kTruth, kNone };
  Dims sizes;
  double low = -2, high = 2;
  Kind kind = kReal;
  int64_t below = 0;

  In(std::initializer_list<int64_t> sizes) : sizes(sizes) {}
  In(const Dims& sizes, double low, double high) : sizes(sizes), low(low), high(high) {}
  static In index(const Dims& sizes, int64_t below) {
    In i(sizes, 0, 0);
    i.kind = kIndex, i.below = below;
    return i;
  }
  static In truth(const Dims& sizes) {
    In i(sizes, 0, 0);
    i.kind = kTruth;
    return i;
  }
  static In none() {
    In i{};
    i.kind = kNone;
    return i;
  }
  Tensor draw(uint64_t seed) const;
};
using Sample = std::vector<In>;
Inputs draw(const Sample& sample, uint64_t seed);

struct Row {
  std::string name;
  Function f;
  // Of contiguous inputs without a history, by loops that share nothing with Sherd's ops; float64,
  // or values that are compared as such.
  Function reference;
  std::vector<Sample> samples;  // the small ones are differentiated too
  Sample large = {};            // to be cut among threads; none: the last sample
  double tolerance = 1;         // factor on what rounding allows
  bool differentiable = true;
  bool twice = true;     // can be differentiated twice
  bool is_view = false;  // the result shares the first input's memory
  bool exact = false;    // the same bits for all layouts (else the order of additions may change)
  bool library =
      false;  // a product by a library: its bits may depend on threads and instruction set
  bool differentiates_constants = false;  // some inputs are taken as constants: no gradcheck
  std::vector<double> bad = {NAN, INFINITY,
                             -INFINITY};  // what one element of the first input is set to
  enum Integers {
    kRefused,
    kBecomeFloat,
    kStay,
    kTimesNumber,
    kWide,
    kToBool,
    kToIndex
  } integers = kRefused;
  std::vector<double> special =
      {};  // for pointwise ops: these values, in every combination of the inputs
  // The forms in place (result into x, from x and the others) and with a given output.
  std::function<void(Tensor& x, const Inputs& others)> in_place = nullptr;
  std::function<void(Tensor& out, const Inputs& in)> out = nullptr;
  // Calls that must throw an Error that begins with the op in brackets.
  std::vector<std::function<void()>> refused = {};
};

std::vector<Row> pointwise_rows();
std::vector<Row> reduction_rows();
std::vector<Row> view_rows();
std::vector<Row> structured_rows();

// ---- what references are written with
// The element at an index (of any dtype, as double).
double at(const Tensor& t, const Dims& index);
// A float64 tensor from a function of the index.
Tensor build(const Dims& sizes, const std::function<double(const Dims& index)>& f);
// f(index) for each index of `sizes`, in row-major order.
void for_each_index(const Dims& sizes, const std::function<void(const Dims& index)>& f);
// The element that broadcasting pairs with `index` of a larger shape.
double broadcast_at(const Tensor& t, const Dims& index);
// `index` with dimension `d` set to `i`.
Dims with(Dims index, int d, int64_t i);
// The first, or last, n of an index.
Dims head(const Dims& index, int n);
Dims tail(const Dims& index, int n);
Dims joined(const Dims& a, const Dims& b);

}  // namespace sherd::test
