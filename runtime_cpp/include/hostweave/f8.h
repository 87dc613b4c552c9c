// Element types of 8 bits: a header of its own, because it takes a compiler longer than those of 16.
#pragma once
#include <cuda_fp8.h>

#include "hostweave/device.h"

namespace hw {

// What is too large becomes the largest number, also an infinity, of which it has none.
using f8e4m3 = __nv_fp8_e4m3;

// What is too large becomes an infinity, which CUDA's own conversion does not give.
struct f8e5m2 : __nv_fp8_e5m2 {
  f8e5m2() = default;
  HW_DEVICE explicit f8e5m2(float value) : __nv_fp8_e5m2(value) {
    constexpr float kTooLarge = 61440.0f;  // half-way from the largest number to the next power of 2
    if (value >= kTooLarge) __x = 0x7c;
    if (value <= -kTooLarge) __x = 0xfc;
  }
};

}  // namespace hw
