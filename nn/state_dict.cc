#include "nn/state_dict.h"

#include <unordered_map>
#include <unordered_set>

namespace sherd::nn {

void StateDict::set(const std::string& name, const Tensor& t) {
  for (auto& e : entries_)
    if (e.first == name) {
      e.second = t;
      return;
    }
  entries_.emplace_back(name, t);
}
const Tensor* StateDict::find(const std::string& name) const {
  for (auto& e : entries_)
    if (e.first == name) return &e.second;
  return nullptr;
}
const Tensor& StateDict::at(const std::string& name) const {
  if (const Tensor* t = find(name)) return *t;
  fail("[state_dict] there is no entry ", name, " among ", entries_.size());
}

LoadResult check_state(const std::string& what, const std::vector<ExpectedTensor>& expected,
                       const std::vector<ExpectedTensor>& found, bool strict) {
  LoadResult result;
  std::unordered_map<std::string, const Dims*> have;
  for (auto& f : found) have[f.name] = &f.shape;
  std::unordered_set<std::string> known;
  std::string shapes;
  for (auto& e : expected) {
    known.insert(e.name);
    auto it = have.find(e.name);
    if (it == have.end())
      result.missing.push_back(e.name);
    else if (!(*it->second == e.shape))
      shapes += concat("\n  ", e.name, ": shape ", *it->second, ", the model's is ", e.shape);
  }
  for (auto& f : found)
    if (!known.count(f.name)) result.unexpected.push_back(f.name);
  std::string text;
  auto list = [&](const char* title, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text += concat("\n  ", title, ":");
    for (auto& n : names) text += " " + n;
  };
  if (strict) list("missing", result.missing), list("unexpected", result.unexpected);
  text += shapes;
  if (!text.empty()) fail("[", what, "] the entries do not fit the model:", text);
  return result;
}

}  // namespace sherd::nn
