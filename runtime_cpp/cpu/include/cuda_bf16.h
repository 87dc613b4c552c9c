// __nv_bfloat16 with the layout, rounding (nearest even) and NaN (0x7fff) of CUDA's header. A double is first rounded to float.
#pragma once
#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  unsigned short __x;

  __nv_bfloat16() = default;
  __nv_bfloat16(float value) : __x(round(value)) {}
  operator float() const { return widen(__x); }

  static unsigned short round(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<unsigned short>(nan ? 0x7fffu : rounded);
  }
  static float widen(unsigned short half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;

inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
