// 16-bit float types, under their IR names.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "hostweave/f8.h"

namespace hw {

using f16 = __half;
using bf16 = __nv_bfloat16;

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

// Rounds to a smaller float type. The result is in f32.
template <class T>
HW_DEVICE float rounded(float x) {
  return static_cast<float>(T(x));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
HW_DEVICE float rounded<bf16>(float x) {  // Converts a pair, because the instruction for one number is eight times slower.
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
  return __uint_as_float(pair);
}
#endif

}  // namespace hw
