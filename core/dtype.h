// DType: the element types, and dispatch on them by a C++20 lambda:
//
//     visit(x.dtype(), [&]<class T>(Type<T>) { T* p = x.data<T>(); ... });
#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

namespace sherd {

// In order of rank: promotion of two types takes the later one (float16 with bfloat16: float32).
enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64
};
inline constexpr DType kBool = DType::kBool, kUInt8 = DType::kUInt8, kInt32 = DType::kInt32,
                       kInt64 = DType::kInt64, kFloat16 = DType::kFloat16,
                       kBFloat16 = DType::kBFloat16, kFloat32 = DType::kFloat32,
                       kFloat64 = DType::kFloat64;
inline constexpr int kDTypes = 8;

constexpr int64_t size_of(DType d) { return std::array{1, 1, 4, 8, 2, 2, 4, 8}[int(d)]; }
constexpr const char* name_of(DType d) {
  return std::array{
      "bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}[int(d)];
}
inline std::string to_string(DType d) { return name_of(d); }
inline std::ostream& operator<<(std::ostream& out, DType d) { return out << name_of(d); }
constexpr bool is_float(DType d) { return d >= kFloat16; }
// The least and the greatest value of an integer dtype; 2^63 stands for the one below it.
constexpr std::pair<double, double> range_of(DType d) {
  if (d == kUInt8) return {0, 255};
  if (d == kInt32) return {-0x1p31, 0x1p31 - 1};
  return {-0x1p63, 0x1p63};
}

// PyTorch's promotion of two types.
constexpr DType promote(DType a, DType b) {
  if (a > b) {
    DType t = a;
    a = b, b = t;
  }
  return a == kFloat16 && b == kBFloat16 ? kFloat32 : b;
}

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct Type {
  using type = T;
};

template <class F>
decltype(auto) visit(DType d, F&& f) {
  switch (d) {
    case kBool:
      return f(Type<bool>{});
    case kUInt8:
      return f(Type<uint8_t>{});
    case kInt32:
      return f(Type<int32_t>{});
    case kInt64:
      return f(Type<int64_t>{});
    case kFloat16:
      return f(Type<Float16>{});
    case kBFloat16:
      return f(Type<BFloat16>{});
    case kFloat32:
      return f(Type<float>{});
    default:
      return f(Type<double>{});
  }
}

// The DType of a C++ type: dtype_of<float> is kFloat32.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<bool> {
  static constexpr DType value = kBool;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = kUInt8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = kInt32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = kInt64;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = kFloat16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = kBFloat16;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = kFloat32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = kFloat64;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace sherd
