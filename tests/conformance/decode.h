// Decodes the values of a recorded case (export_ops.py says how they are encoded) by the C++ type
// of the parameter that takes them.
//
//     Decoder d{buffers};
//     Tensor x = d.as<Tensor>(test["input"], "input");     // d.leaves["input"] if it wants a
//     gradient
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "autograd/ops.h"
#include "core/tensor.h"

namespace sherd::test {

using Json = nlohmann::json;
using Tensors = std::map<std::string, Tensor>;

// The call cannot be made here: an op, keyword or kind of argument that Sherd does not have.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The parameter exists, but its C++ type does not take such a value: the compiler refuses the call.
struct WrongType : Unsupported {
  using Unsupported::Unsupported;
};

inline DType parse_dtype(const std::string& name) {
  for (int d = 0; d < kDTypes; ++d)
    if (name == name_of(DType(d))) return DType(d);
  throw Unsupported("dtype " + name);
}

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

struct Decoder {
  const Tensors& buffers;
  Tensors leaves = {};  // by path
  bool wide = false;    // floating point tensors as float64, whatever they were

  Tensor buffer(const std::string& name) const {
    auto it = buffers.find(name);
    if (it == buffers.end()) throw Unsupported("dtype of a tensor");
    return widened(it->second);
  }
  // A result of PyTorch's, contiguous.
  Tensor recorded(const Json& v) const {
    const Dims sizes(v["sizes"].get<std::vector<int64_t>>());
    return buffers.at(v["t"]).as_strided_raw(sizes, contiguous_strides(sizes), 0);
  }
  // An argument as it was: a strided view of its buffer.
  Tensor tensor(const Json& v) const {
    return buffer(v["t"]).as_strided_raw(v["sizes"].get<std::vector<int64_t>>(),
                                         v["strides"].get<std::vector<int64_t>>(), v["offset"]);
  }
  DType dtype(DType d) const { return wide && is_float(d) ? kFloat64 : d; }

  template <class T>
  T as(const Json& v, const std::string& path) {
    const std::string key = v.is_object() && v.size() == 1 ? v.begin().key() : "";
    if constexpr (std::is_same_v<T, Tensor>) {
      if (v.is_null()) return {};
      if (key == "i") return Tensor(v["i"].get<int64_t>());
      if (key == "b") return Tensor(v["b"].get<bool>());
      if (key == "f") return Tensor(number(v));
      if (!v.is_object() || !v.contains("t")) throw WrongType("a tensor is expected at " + path);
      const Tensor t = tensor(v);
      if (v["grad"].get<bool>()) leaves[path] = t.set_requires_grad();
      return t;
    } else if constexpr (IsVector<T>::value) {
      if (key != "list") throw WrongType("a list is expected at " + path);
      T list;
      for (size_t i = 0; i < v["list"].size(); ++i) {
        if (v["list"][i].is_null()) throw WrongType("none in the list at " + path);
        list.push_back(as<typename T::value_type>(v["list"][i], path + "." + std::to_string(i)));
      }
      return list;
    } else if constexpr (std::is_same_v<T, Dims>) {
      Dims d;
      if (key == "i")
        d.push(v["i"]);
      else if (key == "list")
        for (auto& x : v["list"]) d.push(as<int64_t>(x, path));
      else if (!v.is_null())
        throw WrongType("a list of integers is expected at " + path);
      return d;
    } else if constexpr (IsOptional<T>::value) {
      return v.is_null() ? T{} : T(as<typename T::value_type>(v, path));
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (key != "s") throw WrongType("a string is expected at " + path);
      return v["s"];
    } else if constexpr (std::is_same_v<T, Reduction>) {
      const std::string name = as<std::string>(v, path);
      if (name == "none") return Reduction::kNone;
      if (name == "mean") return Reduction::kMean;
      if (name == "sum") return Reduction::kSum;
      throw WrongType(name + " is no reduction");
    } else if constexpr (std::is_same_v<T, DType>) {
      if (key != "dtype") throw WrongType("a dtype is expected at " + path);
      return dtype(parse_dtype(v["dtype"]));
    } else if constexpr (std::is_same_v<T, bool>) {
      if (key == "b") return v["b"].get<bool>();
      if (key == "i") return v["i"].get<int64_t>() != 0;
    } else if constexpr (std::is_same_v<T, int64_t>) {
      if (key == "i") return v["i"].get<int64_t>();
      if (key == "b") return v["b"].get<bool>();
    } else {
      static_assert(std::is_same_v<T, double>);
      if (key == "i" || key == "f" || key == "b") return number(v);
    }
    throw WrongType("argument at " + path);
  }

 private:
  Tensor widened(const Tensor& t) const {
    return wide && is_float(t.dtype()) ? to_raw(t, kFloat64) : t;
  }
  static double number(const Json& v) {
    if (v.contains("i")) return v["i"].get<double>();
    if (v.contains("b")) return v["b"].get<bool>();
    return std::stod(v["f"].get<std::string>());
  }
};

}  // namespace sherd::test
