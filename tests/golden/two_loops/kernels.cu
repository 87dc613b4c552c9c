#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_loops {

// %maximum: bf16[M, part(F, x)] = maximum(%product_2, -1.0)
// %minimum: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
__global__ void maximum_minimum_minimum(const hw::bf16* product_2, hw::bf16* minimum, int64_t M, int64_t F_x) {
  for (int64_t i : hw::over_grid(M * F_x)) {
    const float product_2_i = float(product_2[i]);
    const float maximum = (product_2_i > (-1.0f) || product_2_i != product_2_i) ? product_2_i : (-1.0f);
    minimum[i] = hw::bf16((maximum < 1.0f || maximum != maximum) ? maximum : 1.0f);
  }
}

// %y: bf16[M/4, N] = sum(%landing, axis=(0,))
__global__ void sum_y(const hw::bf16* landing, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t j : hw::over_grid(M / 4 * N)) {
    float sum = 0;
    for (int64_t i = 0; i < 4; ++i) {
      sum += float(landing[i * (M / 4 * N) + j]);
    }
    y[j] = hw::bf16(sum);
  }
}

}  // namespace programs::two_loops
