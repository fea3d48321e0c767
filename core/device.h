// Device: where a Storage's bytes are. The meta device has shapes and dtypes, and no bytes.
#pragma once
#include <cstdint>
#include <string>

namespace sherd {

enum class DeviceType : uint8_t { kCPU, kCUDA, kMeta };
inline constexpr int kDeviceTypes = 3;

struct Device {
  DeviceType type = DeviceType::kCPU;
  int8_t index = 0;

  bool is_cpu() const { return type == DeviceType::kCPU; }
  bool is_cuda() const { return type == DeviceType::kCUDA; }
  bool is_meta() const { return type == DeviceType::kMeta; }
  bool operator==(const Device&) const = default;
};
inline constexpr Device kCPU{DeviceType::kCPU}, kMeta{DeviceType::kMeta};

inline std::string to_string(Device d) {
  return d.is_cpu() ? "cpu" : d.is_meta() ? "meta" : "cuda:" + std::to_string(d.index);
}

}  // namespace sherd
