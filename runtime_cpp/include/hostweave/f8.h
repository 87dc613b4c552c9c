// 8-bit float types. This header is separate, because cuda_fp8.h compiles slowly.
#pragma once
#include <cuda_fp8.h>

#include "hostweave/device.h"

namespace hw {

// Conversion saturates. The type has no infinities, so an infinity becomes the largest number of its sign.
using f8e4m3 = __nv_fp8_e4m3;

// Conversion overflows to infinity. CUDA's conversion saturates instead.
struct f8e5m2 : __nv_fp8_e5m2 {
  f8e5m2() = default;
  HW_DEVICE explicit f8e5m2(float value) : __nv_fp8_e5m2(value) {
    constexpr float kTooLarge = 61440.0f;  // halfway between the largest number and the next power of 2
    if (value >= kTooLarge) __x = 0x7c;
    if (value <= -kTooLarge) __x = 0xfc;
  }
};

#ifdef __CUDACC__
// Rounds pairs of numbers. A pair takes as long as one number. `to` must be aligned to 2 bytes.
template <int kCount>
  requires(kCount % 2 == 0)
__device__ void round_pairs(const float (&from)[kCount], f8e4m3 (&to)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    *reinterpret_cast<__nv_fp8x2_storage_t*>(&to[e]) = __nv_fp8x2_e4m3(float2{from[e], from[e + 1]}).__x;
  }
}
#endif

}  // namespace hw
