// Reads a .safetensors file: read_safetensors(path)["embedding.weight"].
#pragma once
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/tensor.h"

namespace sherd::test {

using Tensors = std::map<std::string, Tensor>;

// A dtype by safetensors' name ("F32") or PyTorch's ("float32").
inline DType parse_dtype(const std::string& s) {
  static const std::map<std::string, DType> names{
      {"BOOL", kBool},   {"U8", kUInt8},    {"I32", kInt32},   {"I64", kInt64},
      {"F16", kFloat16}, {"F32", kFloat32}, {"F64", kFloat64}, {"BF16", kBFloat16}};
  if (auto it = names.find(s); it != names.end()) return it->second;
  for (int d = 0; d < kDTypes; ++d)
    if (s == name_of(DType(d))) return DType(d);
  fail("[safetensors] unknown dtype ", s);
}

inline Tensors read_safetensors(const std::string& path) {
  std::ifstream f(path, std::ios::binary);
  uint64_t n = 0;
  if (!f.read(reinterpret_cast<char*>(&n), 8) || n > (1u << 28))
    fail("[safetensors] cannot read ", path);
  std::string header(n, 0);
  f.read(header.data(), std::streamsize(n));
  Tensors result;
  const auto index = nlohmann::json::parse(header);
  for (auto& [name, v] : index.items()) {
    if (name == "__metadata__") continue;
    DType dtype;
    try {
      dtype = parse_dtype(v.at("dtype"));
    } catch (const Error&) {
      continue;  // such as int16: whoever asks for it finds it missing
    }
    const Tensor t = empty(Dims(v.at("shape").get<std::vector<int64_t>>()), dtype);
    f.seekg(std::streamoff(8 + n + v.at("data_offsets")[0].get<uint64_t>()));
    if (t.numel() && !f.read(t.bytes(), t.nbytes()))
      fail("[safetensors] ", path, ": ", name, " is cut short");
    result.emplace(name, t);
  }
  return result;
}

}  // namespace sherd::test
