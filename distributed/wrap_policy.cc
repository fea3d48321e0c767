#include "distributed/wrap_policy.h"

#include <unordered_set>

#include "nn/multihead_attention.h"

namespace sherd {
namespace {

class SizeBased {
 public:
  SizeBased(int64_t min, const SizeBasedOptions& options) : min_(min), options_(options) {}

  std::vector<nn::Module*> operator()(nn::Module& root) {
    visit(root, true);
    return std::move(chosen_);
  }

 private:
  bool is_leaf(nn::Module& m) const {
    return options_.force_leaf ? options_.force_leaf(m)
                               : dynamic_cast<nn::MultiheadAttention*>(&m) != nullptr;
  }

  // Returns the number of parameters below `m` that units took.
  int64_t visit(nn::Module& m, bool is_root) {
    const int64_t all = m.num_parameters();
    if (all < min_) return 0;
    int64_t taken = 0;
    if (!is_leaf(m))
      for (auto& [name, child] : m.named_children()) taken += visit(*child, false);
    if (is_root || m.is_container() || all - taken < min_) return taken;
    chosen_.push_back(&m);
    return all;
  }

  int64_t min_;
  const SizeBasedOptions& options_;
  std::vector<nn::Module*> chosen_;
};

void visit(nn::Module& m, bool is_root, const std::function<bool(nn::Module&)>& predicate,
           std::vector<nn::Module*>& chosen) {
  for (auto& [name, child] : m.named_children()) visit(*child, false, predicate, chosen);
  if (!is_root && !m.is_container() && predicate(m)) chosen.push_back(&m);
}

}  // namespace

WrapPolicy size_based_auto_wrap_policy(int64_t min_num_params, const SizeBasedOptions& options) {
  if (min_num_params < 1)
    fail("[size_based_auto_wrap_policy] min_num_params must be at least 1, got ", min_num_params);
  return [=](nn::Module& root) { return SizeBased(min_num_params, options)(root); };
}

WrapPolicy lambda_auto_wrap_policy(std::function<bool(nn::Module&)> predicate) {
  return [predicate = std::move(predicate)](nn::Module& root) {
    std::vector<nn::Module*> chosen;
    visit(root, true, predicate, chosen);
    return chosen;
  };
}

}  // namespace sherd
