// __nv_fp8_e4m3 and __nv_fp8_e5m2 of CUDA's cuda_fp8.h. Conversion rounds to nearest even and saturates (__NV_SATFINITE). NaN
// stays NaN. The code uses builtins instead of <cmath>, because every program includes this header and <cmath> compiles slowly.
#pragma once

typedef unsigned char __nv_fp8_storage_t;

namespace hostweave_cpu_fp8 {

// kHasInfinity: numbers with the highest exponent are infinity or NaN.
template <int kMantissa, int kBias, bool kHasInfinity>
struct Float {
  __nv_fp8_storage_t __x;

  Float() = default;
  explicit Float(float value) : __x(round(value)) {}
  explicit operator float() const { return widen(__x); }

 private:
  static constexpr int kOne = 1 << kMantissa;  // the mantissa of 1.0
  static constexpr unsigned char kNan = 0x7f;

  static float widen(__nv_fp8_storage_t bits) {
    const int exponent = (bits & 0x7f) >> kMantissa, mantissa = bits & (kOne - 1);
    float value;
    if (kHasInfinity && exponent == (0x7f >> kMantissa)) {
      value = mantissa ? __builtin_nanf("") : __builtin_inff();
    } else if (!kHasInfinity && (bits & 0x7f) == kNan) {
      value = __builtin_nanf("");
    } else {
      value = exponent ? __builtin_ldexpf(static_cast<float>(kOne + mantissa), exponent - kBias - kMantissa)
                       : __builtin_ldexpf(static_cast<float>(mantissa), 1 - kBias - kMantissa);
    }
    return bits & 0x80 ? -value : value;
  }

  static __nv_fp8_storage_t round(float value) {
    if (__builtin_isnan(value)) return kNan;
    const int sign = __builtin_signbit(value) ? 0x80 : 0;
    const unsigned char largest = kHasInfinity ? 0x7f - kOne : kNan - 1;
    const float magnitude = __builtin_fabsf(value);
    if (magnitude >= widen(largest)) return sign | largest;
    int exponent = magnitude > 0 ? __builtin_ilogbf(magnitude) : 1 - kBias;
    if (exponent < 1 - kBias) exponent = 1 - kBias;
    int digits = static_cast<int>(__builtin_nearbyintf(__builtin_ldexpf(magnitude, kMantissa - exponent)));
    if (digits == 2 * kOne) {
      digits = kOne;
      ++exponent;
    }
    return sign | (digits < kOne ? digits : ((exponent + kBias) << kMantissa) + digits - kOne);
  }
};

}  // namespace hostweave_cpu_fp8

using __nv_fp8_e4m3 = hostweave_cpu_fp8::Float<3, 7, false>;
using __nv_fp8_e5m2 = hostweave_cpu_fp8::Float<2, 15, true>;
