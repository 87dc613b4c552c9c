// Device functions in addition to <cmath>.
#pragma once
#include <cmath>
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/reduce_ops.h"

namespace hw {

// Rounds to f32. GCC 12 wrongly optimises double(float(x)) to x in vectorised code.
HW_DEVICE float to_f32(double x) {
  auto rounded = static_cast<float>(x);
#ifndef __CUDACC__
  asm("" : "+m"(rounded));
#endif
  return rounded;
}

HW_DEVICE float gelu(float x) { return x / 2.0f * erfcf(x * -0.70710678118654752f); }
HW_DEVICE double gelu(double x) { return x / 2.0 * erfc(x * -0.70710678118654752); }

HW_DEVICE double log_gamma(double x) {
#ifdef __CUDACC__
  return lgamma(x);
#else
  int sign;  // avoids lgamma's global variable
  return lgamma_r(x, &sign);
#endif
}
// Computed in f64, to be accurate if the result is near 0.
HW_DEVICE float log_gamma(float x) { return static_cast<float>(log_gamma(static_cast<double>(x))); }

// Divisor of many numbers. A GPU multiplies by the reciprocal of the divisor, with an error of up to 2 ulp. Pass kNormal only if
// the divisor and its reciprocal are normal numbers.
constexpr bool kNormal = true;

template <bool kIsNormal = false>
class Divisor {
 public:
#ifdef __CUDACC__
  HW_DEVICE explicit Divisor(float divisor) : scale_(!kIsNormal && fabsf(divisor) < 0x1p-64f ? 0x1p64f : 1.0f) {
    if (!kIsNormal && fabsf(divisor) > 0x1p64f) scale_ = 0x1p-64f;
    reciprocal_ = 1.0f / (scale_ * divisor);
  }
  friend __device__ float operator/(float x, const Divisor& by) { return x * by.scale_ * by.reciprocal_; }

 private:
  float scale_, reciprocal_;  // the scale keeps the reciprocal of a finite nonzero number finite and normal
#else
  explicit Divisor(float divisor) : divisor_(divisor) {}
  friend float operator/(float x, const Divisor& by) { return x / by.divisor_; }

 private:
  float divisor_;
#endif
};

// Approximations for kernels with elements of at most 16 bits. Errors are up to about 100 ulp for exp and sigmoid. erf is the
// rational function of XLA and Eigen. gelu has a relative error of up to about 1e-5, by Abramowitz and Stegun 7.1.26 with
// coefficients for small relative error.
#ifdef __CUDACC__
HW_DEVICE float fast_exp(float x) { return __expf(x); }
HW_DEVICE float fast_sigmoid(float x) {  // results below 2^-126 are 0
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}
HW_DEVICE float fast_erf(float x) {
  x = Maximum()(Minimum()(x, 4.0f), -4.0f);
  const float y = x * x;
  float p = -2.72614225801306e-10f;
  p = p * y + 2.77068142495902e-08f;
  p = p * y - 2.10102402082508e-06f;
  p = p * y - 5.69250639462346e-05f;
  p = p * y - 7.34990630326855e-04f;
  p = p * y - 2.95459980854025e-03f;
  p = p * y - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * y - 2.13374055278905e-04f;
  q = q * y - 1.68282697438203e-03f;
  q = q * y - 7.37332916720468e-03f;
  q = q * y - 1.42647390514189e-02f;
  return __fdividef(x * p, q);
}
HW_DEVICE float fast_gelu(float x) {
  const float z = Minimum()(fabsf(x), 14.0f);
  float t, power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.0f + 0.31f * z));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * z * z));  // exp(-z * z / 2)
  float p = -0.07392231f;
  p = p * t + 0.18042914f;
  p = p * t + 0.01577021f;
  p = p * t + 0.133415f;
  p = p * t + 0.12044539f;
  p = p * t + 0.12386026f;
  return Maximum()(x, 0.0f) - z * (p * t * power);
}
#else
HW_DEVICE float fast_exp(float x) { return expf(x); }
HW_DEVICE float fast_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
HW_DEVICE float fast_erf(float x) { return erff(x); }
HW_DEVICE float fast_gelu(float x) { return gelu(x); }
#endif

// Integer arithmetic that wraps around, in the promoted type. Signed overflow would be undefined behaviour.
template <class A, class B>
HW_DEVICE auto plus(A a, B b) {
  return static_cast<decltype(a + b)>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class A, class B>
HW_DEVICE auto minus(A a, B b) {
  return static_cast<decltype(a - b)>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template <class A, class B>
HW_DEVICE auto times(A a, B b) {
  return static_cast<decltype(a * b)>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
// Truncates to i64. A narrower T gets the low bits. Numbers from 2^63 to below 2^64 are converted through u64. NaN and other
// numbers out of range give -2^63.
template <class T, class F>
HW_DEVICE T to_int(F x) {
  if (x >= F(0x1p63) && x < F(0x1p64)) return static_cast<T>(static_cast<uint64_t>(x));
  return static_cast<T>(x >= F(-0x1p63) && x < F(0x1p63) ? static_cast<int64_t>(x) : INT64_MIN);
}
// Integer division. floor_divide rounds down. fmod has the sign of the dividend, and remainder has the sign of the divisor. All
// three return 0 if the divisor is 0. The code tests `< 1`, because compilers warn about `< 0` for unsigned types.
template <class A, class B>
HW_DEVICE auto floor_divide(A left, B right) {
  using T = decltype(left + right);
  const T a = left, b = right;
  if (b == 0) return T(0);
  if (T(-1) < T(1) && b == T(-1)) return static_cast<T>(minus(0, a));  // the negative of the smallest integer wraps around
  const T quotient = a / b;
  return static_cast<T>(quotient - (quotient * b != a && (a < T(1)) != (b < T(1))));
}
template <class A, class B>
HW_DEVICE auto fmod(A left, B right) {
  using T = decltype(left + right);
  const T a = left, b = right;
  return b == 0 || (T(-1) < T(1) && b == T(-1)) ? T(0) : static_cast<T>(a % b);
}
template <class A, class B>
HW_DEVICE auto remainder(A left, B right) {
  const auto rest = hw::fmod(left, right);
  using T = decltype(left + right);
  const T b = right;
  return static_cast<T>(rest != 0 && (rest < T(1)) != (b < T(1)) ? rest + b : rest);
}
template <class A, class B>
HW_DEVICE auto gcd(A left, B right) {
  using T = decltype(left + right);
  T a = left, b = right;
  while (b != 0) {
    const T rest = hw::fmod(a, b);
    a = b, b = rest;
  }
  return static_cast<T>(a < T(1) ? minus(0, a) : a);
}
// Float versions with the semantics of NumPy.
HW_DEVICE float copy_sign(float x, float sign) { return copysignf(x, sign); }
HW_DEVICE double copy_sign(double x, double sign) { return copysign(x, sign); }
HW_DEVICE float fmod(float a, float b) { return fmodf(a, b); }
HW_DEVICE double fmod(double a, double b) { return ::fmod(a, b); }
template <class T>
  requires(T(0.5f) != T(0))
HW_DEVICE T remainder(T a, T b) {
  const T rest = hw::fmod(a, b);
  if (rest == T(0)) return copy_sign(T(0), b);
  return (rest < T(0)) != (b < T(0)) ? rest + b : rest;
}
template <class T>
  requires(T(0.5f) != T(0))
HW_DEVICE T floor_divide(T a, T b) {
  if (b == T(0)) return a / b;
  const T rest = hw::fmod(a, b);
  T quotient = (a - rest) / b;
  if (rest != T(0) && (rest < T(0)) != (b < T(0))) quotient -= T(1);
  if (quotient == T(0)) return copy_sign(T(0), a / b);
  const T floored = floor(quotient);
  return quotient - floored > T(0.5) ? floored + T(1) : floored;
}

// Shifts by the width or more give 0, or -1 for an arithmetic shift of a negative number.
template <class A, class B>
HW_DEVICE auto left_shift(A bits, B by) {
  using T = decltype(bits + by);
  return uint64_t(by) < 8 * sizeof(T) ? static_cast<T>(static_cast<uint64_t>(bits) << by) : T(0);
}
template <class A, class B>
HW_DEVICE auto right_shift(A bits, B by) {
  using T = decltype(bits + by);
  constexpr int kLast = 8 * sizeof(T) - 1;
  return uint64_t(by) <= kLast ? static_cast<T>(T(bits) >> by) : static_cast<T>(T(bits) >> kLast >> 1);
}

// Uniform number in [0, 1) from the first word of Philox 4x32-10 for counter (i, j, k, m) and key (seed, draw).
HW_DEVICE float philox(uint32_t i, uint32_t j, uint32_t k, uint32_t m, uint32_t seed, uint32_t draw) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{i} * 0xD2511F53u, right = uint64_t{k} * 0xCD9E8D57u;
    i = static_cast<uint32_t>(right >> 32) ^ j ^ seed;
    k = static_cast<uint32_t>(left >> 32) ^ m ^ draw;
    j = static_cast<uint32_t>(right);
    m = static_cast<uint32_t>(left);
    seed += 0x9E3779B9u;
    draw += 0xBB67AE85u;
  }
  return static_cast<float>(i >> 8) * 0x1p-24f;
}

}  // namespace hw
