// Memory of the current device.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "hostweave/check.h"

namespace hw {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // Returns at least this many bytes. Reallocates if there are fewer, without keeping the contents.
  void* reserve(size_t bytes) {
    if (bytes > bytes_) {
      bytes_ = 0;
      HW_CHECK(cudaFree(std::exchange(data_, nullptr)));  // Waits until the calls that use the old memory have ended.
      const std::string call = "cudaMalloc of " + std::to_string(bytes) + " bytes";
      HW_LOCATION("cudaMalloc");
      check(cudaMalloc(&data_, bytes), call.c_str(), HW_FILE, __LINE__);
      bytes_ = bytes;
    }
    return data_;
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hw
