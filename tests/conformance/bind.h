// Binds an op's public C++ function to recorded cases: arguments are decoded by their C++ types,
// names and defaults are given once, in PyTorch's words.
//
//     bind("nn.functional.layer_norm", "input normalized_shape weight=none bias=none eps=1e-5",
//     layer_norm);
//
// A default is none, a number, true, false, or a word. A parameter without one must be in the case.
#pragma once
#include <functional>
#include <map>
#include <sstream>

#include "tests/conformance/report.h"

namespace sherd::test {

// Makes the call of one case.
using Bound = std::function<Outputs(Decoder&, const Json& test)>;

class Bindings {
 public:
  const Bound* find(const std::string& op) const {
    auto it = bound_.find(op);
    return it == bound_.end() ? nullptr : &it->second;
  }

  template <class R, class... A>
  void bind(const std::string& op, const std::string& names, R (*f)(A...)) {
    const std::vector<Parameter> parameters = parse(names);
    if (parameters.size() != sizeof...(A))
      fail("[bind] ", op, ": \"", names, "\" does not name each of ", sizeof...(A), " parameters");
    bound_[op] = [parameters, f](Decoder& d, const Json& test) {
      refuse_others(parameters, test);
      return [&]<size_t... i>(std::index_sequence<i...>) {
        // In braces: evaluated from left to right.
        std::tuple<std::decay_t<A>...> a{
            argument<std::decay_t<A>>(parameters[i], int(i), d, test)...};
        return list(f(std::get<i>(a)...));
      }
      (std::index_sequence_for<A...>{});
    };
  }
  template <class F>
  void bind(const std::string& op, const std::string& names, F lambda) {
    bind(op, names, +lambda);
  }
  // Where a name is overloaded, the signature says which.
  using Unary = Tensor(const Tensor&);
  using Binary = Tensor(const Tensor&, const Tensor&);
  void unary(const std::string& op, Unary* f) { bind(op, "input", f); }
  void binary(const std::string& op, const std::string& names, Binary* f) { bind(op, names, f); }

 private:
  struct Parameter {
    std::string name;
    std::optional<Json> otherwise;
  };

  static std::vector<Parameter> parse(const std::string& names) {
    std::vector<Parameter> result;
    std::istringstream in(names);
    for (std::string w; in >> w;) {
      const auto eq = w.find('=');
      if (eq == w.npos) {
        result.push_back({w, {}});
        continue;
      }
      const std::string value = w.substr(eq + 1);
      Json v;
      if (value == "true" || value == "false")
        v = {{"b", value == "true"}};
      else if (value.find_first_not_of("-0123456789") == value.npos)
        v = {{"i", std::stoll(value)}};
      else if (value.find_first_not_of("-.e0123456789") == value.npos)
        v = {{"f", value}};
      else if (value != "none")
        v = {{"s", value}};
      result.push_back({w.substr(0, eq), v});
    }
    return result;
  }
  static void refuse_others(const std::vector<Parameter>& parameters, const Json& test) {
    if (test["args"].size() >= parameters.size() && !test["args"].empty())
      throw Unsupported("too many arguments");
    for (auto& [k, v] : test["kwargs"].items())
      if (std::none_of(parameters.begin(), parameters.end(),
                       [&k = k](auto& p) { return p.name == k; }))
        throw Unsupported("keyword " + k);
  }
  template <class T>
  static T argument(const Parameter& p, int i, Decoder& d, const Json& test) {
    const Json& args = test["args"];
    if (i == 0) return d.as<T>(test["input"], "input");
    if (size_t(i - 1) < args.size())
      return d.as<T>(args[size_t(i - 1)], "args." + std::to_string(i - 1));
    if (test["kwargs"].contains(p.name)) return d.as<T>(test["kwargs"][p.name], "kwargs." + p.name);
    if (!p.otherwise) throw Unsupported("no " + p.name);
    return d.as<T>(*p.otherwise, p.name);
  }
  static Outputs list(const Tensor& y) { return {y}; }
  static Outputs list(Outputs y) { return y; }
  static Outputs list(const std::pair<Tensor, Tensor>& y) { return {y.first, y.second}; }

  std::map<std::string, Bound> bound_;
};

// Every op that Sherd has.
const Bindings& op_bindings();

}  // namespace sherd::test
