// __half with the layout, rounding (nearest even) and NaN (0x7fff) of CUDA's header. A double is first rounded to float.
#pragma once
#include <bit>
#include <cstdint>

struct __half {
  unsigned short __x;

  __half() = default;
  __half(float value) : __x(round(value)) {}
  operator float() const { return widen(__x); }

  // Conversions without branches, so that loops vectorise. The FPU rounds and normalises.
  static unsigned short round(float value) {
    const std::uint32_t bits = bits_of(value), doubled = bits + bits;
    const float magnitude = float_of(bits & 0x7fffffffu);
    const std::uint32_t exponent = doubled & 0xff000000u;
    const std::uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    const float base = float_of((bias >> 1) + 0x07800000u) + (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
    const std::uint32_t result = ((bits_of(base) >> 13) & 0x7c00u) + (bits_of(base) & 0x0fffu);
    const std::uint32_t with_sign = ((bits & 0x80000000u) >> 16) | result;
    return static_cast<unsigned short>(doubled > 0xff000000u ? 0x7fffu : with_sign);
  }
  static float widen(unsigned short half) {
    const std::uint32_t word = static_cast<std::uint32_t>(half) << 16, doubled = word + word;
    const float normal = float_of((doubled >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = float_of((doubled >> 17) | (126u << 23)) - 0.5f;
    return float_of((word & 0x80000000u) | (doubled < (1u << 27) ? bits_of(subnormal) : bits_of(normal)));
  }

 private:
  static std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
  static float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
};
typedef __half half;

inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }
