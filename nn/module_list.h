// ModuleList<M>: children of one type, named "0", "1", ... It has no forward.
//
//     layers(add<nn::ModuleList<Block>>("layers")) { for (...) layers->append(dim, ff_dim); }
//     for (auto& layer : *layers) x = layer(x);
#pragma once
#include "nn/module.h"

namespace sherd::nn {

template <class M>
class ModuleList : public Module {
 public:
  // Constructs a child in place.
  template <class... A>
  Child<M> append(A&&... args) {
    children_.push_back(add<M>(std::to_string(children_.size()), std::forward<A>(args)...));
    return children_.back();
  }
  bool is_container() const override { return true; }
  int64_t size() const { return int64_t(children_.size()); }
  const Child<M>& operator[](int64_t i) const {
    if (i < 0 || i >= size()) fail("[ModuleList] there is no module ", i, " of ", size());
    return children_[size_t(i)];
  }
  auto begin() const { return children_.begin(); }
  auto end() const { return children_.end(); }

 private:
  std::vector<Child<M>> children_;
};

}  // namespace sherd::nn
