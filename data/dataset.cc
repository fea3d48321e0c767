#include "data/dataset.h"

#include <cstring>

namespace sherd::data {
namespace {

std::string names_of(const Batch& batch) {
  std::string text;
  for (const auto& [name, tensor] : batch) text += (text.empty() ? "'" : ", '") + name + "'";
  return text.empty() ? "no names" : text;
}

// Row i of a contiguous tensor.
Tensor row(const Tensor& x, int64_t i) {
  const Dims sizes(std::span(x.sizes().d + 1, size_t(x.dim() - 1)));
  return x.as_strided_raw(sizes, contiguous_strides(sizes), x.storage_offset() + i * sizes.numel());
}

}  // namespace

Batch::Batch(std::initializer_list<Item> items) {
  for (const auto& [name, tensor] : items) {
    if (contains(name)) fail("[Batch] the name '", name, "' stands there twice");
    items_.emplace_back(name, tensor);
  }
}

const Tensor* Batch::find(std::string_view name) const {
  for (const auto& item : items_)
    if (item.first == name) return &item.second;
  return nullptr;
}

const Tensor& Batch::at(std::string_view name) const {
  if (const Tensor* tensor = find(name)) return *tensor;
  fail("[Batch] there is no '", name, "' in this batch; it holds ", names_of(*this));
}

Tensor& Batch::at(std::string_view name) {
  return const_cast<Tensor&>(static_cast<const Batch&>(*this).at(name));
}

void Batch::set(std::string_view name, Tensor tensor) {
  for (auto& item : items_)
    if (item.first == name) {
      item.second = std::move(tensor);
      return;
    }
  items_.emplace_back(name, std::move(tensor));
}

Batch stack_samples(const std::vector<Sample>& samples, const std::vector<int64_t>& indices) {
  if (samples.empty() || samples.size() != indices.size())
    fail("[stack_samples] needs at least one sample and an index for each, got ", samples.size(),
         " samples and ", indices.size(), " indices");
  const Sample& first = samples[0];
  const int64_t count = int64_t(samples.size());
  Batch batch;
  for (const auto& [name, example] : first) {
    if (!example.defined())
      fail("[stack_samples] '", name, "' of sample ", indices[0], " is an undefined tensor");
    Dims sizes{count};
    for (auto size : example.sizes()) sizes.push(size);
    Tensor stacked = empty(sizes, example.dtype(), example.device());
    for (int64_t i = 0; i < count; ++i) {
      const Sample& sample = samples[i];
      if (sample.size() != first.size() || !sample.contains(name))
        fail("[stack_samples] samples ", indices[0], " and ", indices[i],
             " hold different names: ", names_of(first), " and ", names_of(sample));
      const Tensor& x = sample.at(name);
      if (!x.defined())
        fail("[stack_samples] '", name, "' of sample ", indices[i], " is an undefined tensor");
      if (x.sizes() != example.sizes())
        fail("[stack_samples] '", name, "' has shape ", example.sizes(), " in sample ", indices[0],
             " and ", x.sizes(), " in sample ", indices[i],
             ": make them equal in Dataset::get, or give the loader a collate_fn");
      if (x.dtype() != example.dtype() || x.device() != example.device())
        fail("[stack_samples] '", name, "' is ", example.dtype(), " on ", example.device(),
             " in sample ", indices[0], " and ", x.dtype(), " on ", x.device(), " in sample ",
             indices[i]);
      if (x.device().is_cpu() && x.is_contiguous()) {
        if (x.nbytes() > 0) std::memcpy(stacked.bytes() + i * x.nbytes(), x.bytes(), x.nbytes());
      } else {
        copy_raw(row(stacked, i), x);
      }
    }
    batch.set(name, std::move(stacked));
  }
  return batch;
}

TensorDataset::TensorDataset(Batch tensors) {
  if (tensors.size() == 0) fail("[TensorDataset] needs at least one tensor");
  size_ = -1;
  std::string first_name;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.dim() == 0)
      fail("[TensorDataset] '", name, "' has no first dimension to take samples from");
    if (size_ < 0) {
      size_ = tensor.size(0);
      first_name = name;
    }
    if (tensor.size(0) != size_)
      fail("[TensorDataset] '", first_name, "' holds ", size_, " samples and '", name, "' ",
           tensor.size(0), ": first sizes must be equal");
    tensors_.set(name, contiguous_raw(tensor));
  }
}

Sample TensorDataset::get(int64_t index) const {
  if (index < 0 || index >= size_)
    fail("[TensorDataset] sample ", index, " was asked for; there are ", size_);
  Sample sample;
  for (const auto& [name, tensor] : tensors_) sample.set(name, row(tensor, index));
  return sample;
}

}  // namespace sherd::data
