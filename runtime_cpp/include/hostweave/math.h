// Functions that kernels call besides those of <cmath>.
#pragma once
#include <cmath>
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/joins.h"

namespace hw {

// For kernels whose elements have 16 bits or less: e to the x within some 100 units in the last place, and the error function
// within 5, as the quotient of two polynomials that XLA and Eigen have.
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
#else
HW_DEVICE float fast_exp(float x) { return expf(x); }
HW_DEVICE float fast_erf(float x) { return erff(x); }
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
