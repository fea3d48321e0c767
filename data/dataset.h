// Dataset: what a DataLoader reads. A sample is a map from names to tensors, in the order in which
// they were put in; so is a batch, whose tensors have one dimension more in front.
//
//     class Squares : public data::Dataset {
//      public:
//       int64_t size() const override { return 100; }
//       data::Sample get(int64_t i) const override {
//         return {{"x", tensor<float>({float(i)})}, {"y", tensor<float>({float(i * i)})}};
//       }
//     };
//     data::DataLoader loader(squares, {.batch_size = 8});
//     for (auto& batch : loader) train(batch.at("x"), batch.at("y"));     // [8, 1] each
//
// With workers, get() runs in several threads at once: it is const, and what it changes through
// pointers or `mutable` is for the dataset to lock. Random ops inside it (and everything else that
// asks default_generator()) draw from a generator that the loader seeds by (seed, epoch, index), so
// augmentation does not depend on the number of workers, and no two samples get the same.
#pragma once
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace sherd::data {

// Tensors by name. Names are few, so look-up is a walk through them.
class Batch {
 public:
  using Item = std::pair<std::string, Tensor>;

  Batch() = default;
  Batch(std::initializer_list<Item> items);  // Error if a name stands there twice

  // Error that lists the names there are, if `name` is not among them.
  const Tensor& at(std::string_view name) const;
  Tensor& at(std::string_view name);
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  void set(std::string_view name, Tensor tensor);          // replaces, or adds at the end
  int64_t size() const { return int64_t(items_.size()); }  // number of names, not of samples
  auto begin() const { return items_.begin(); }            // over pairs (name, tensor)
  auto end() const { return items_.end(); }

 private:
  const Tensor* find(std::string_view name) const;

  std::vector<Item> items_;
};
using Sample = Batch;

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;             // number of samples
  virtual Sample get(int64_t index) const = 0;  // 0 <= index < size()
  // A number that differs where the samples do; 0: none is known. Each DataLoader asks for it once,
  // and refuses a state of other data.
  virtual uint64_t fingerprint() const { return 0; }
};

// Makes a batch of samples; indices[i] is that of samples[i] in the dataset, for errors.
using CollateFn =
    std::function<Batch(const std::vector<Sample>& samples, const std::vector<int64_t>& indices)>;

// The default: stacks B samples' tensors of sizes [...] into [B, ...], name by name, without
// recording. Error that names both samples where names, shapes, dtypes or devices differ.
Batch stack_samples(const std::vector<Sample>& samples, const std::vector<int64_t>& indices);

// Rows of tensors of one first size N: sample i is row i of each, as a view (no copy). Error if
// first sizes differ, or a tensor has none.
//
//     data::TensorDataset pairs({{"x", x}, {"y", y}});     // [N, 20] and [N, 1]
class TensorDataset : public Dataset {
 public:
  explicit TensorDataset(Batch tensors);
  int64_t size() const override { return size_; }
  Sample get(int64_t index) const override;

 private:
  Batch tensors_;
  int64_t size_ = 0;
};

}  // namespace sherd::data
