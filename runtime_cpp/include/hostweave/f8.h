// 8-bit float types. A separate header, because it is slow to compile.
#pragma once
#include <cuda_fp8.h>

#include "hostweave/device.h"

namespace hw {

// Conversion saturates, also for infinities, which the type lacks.
using f8e4m3 = __nv_fp8_e4m3;
template <class T>
constexpr bool is_rounded_by_pairs = false;
template <>
inline constexpr bool is_rounded_by_pairs<f8e4m3> = true;

// Conversion overflows to infinity, unlike CUDA's own, which saturates.
struct f8e5m2 : __nv_fp8_e5m2 {
  f8e5m2() = default;
  HW_DEVICE explicit f8e5m2(float value) : __nv_fp8_e5m2(value) {
    constexpr float kTooLarge = 61440.0f;  // halfway between the largest number and the next power of 2
    if (value >= kTooLarge) __x = 0x7c;
    if (value <= -kTooLarge) __x = 0xfc;
  }
};

}  // namespace hw
