// Functions that kernels call besides those of <cmath>.
#pragma once
#include <cmath>
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/reduce_ops.h"

namespace hw {

// Rounds, also where the result is widened again: GCC 12 takes double(float(x)) of vectors for x.
HW_DEVICE float to_f32(double x) {
  auto rounded = static_cast<float>(x);
#ifndef __CUDACC__
  asm("" : "+m"(rounded));
#endif
  return rounded;
}

HW_DEVICE float gelu(float x) { return x / 2.0f * erfcf(x * -0.70710678118654752f); }
HW_DEVICE double gelu(double x) { return x / 2.0 * erfc(x * -0.70710678118654752); }

// For kernels whose elements have 16 bits or less: e to the x within some 100 units in the last place; the error function within
// 5, as the quotient of two polynomials that XLA and Eigen have; and gelu within 1e-5 of itself, from the tail of the normal
// distribution in the form of Abramowitz and Stegun 7.1.26, with factors that keep its relative error small.
#ifdef __CUDACC__
HW_DEVICE float fast_exp(float x) { return __expf(x); }
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
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-0.72134752f * z * z));  // e to the -z * z / 2
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
HW_DEVICE float fast_erf(float x) { return erff(x); }
HW_DEVICE float fast_gelu(float x) { return gelu(x); }
#endif

// A uniform number from 0 to below 1: the first word of Philox 4x32-10 of the counter (i, j, k, m) under the key (seed, draw).
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
