#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_loops {

// %maximum: bf16[M, part(F, x)] = maximum(%product_2, -1.0)
// %minimum: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
template <int kWidth>
__device__ void maximum_minimum_minimum_by(const hw::bf16* product_2, hw::bf16* minimum, int64_t M, int64_t F_x) {
  for (int64_t i : hw::over_grid<kWidth>(M * F_x)) {
    const auto product_2_i = hw::load<kWidth>(product_2 + i);
    hw::Values<hw::bf16, kWidth> minimum_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float product_2_e = float(product_2_i[e]);
      const float maximum = (product_2_e > (-1.0f) || product_2_e != product_2_e) ? product_2_e : (-1.0f);
      minimum_i[e] = hw::bf16((maximum < 1.0f || maximum != maximum) ? maximum : 1.0f);
    }
    hw::store(minimum + i, minimum_i);
  }
}

__global__ void maximum_minimum_minimum(const hw::bf16* product_2, hw::bf16* minimum, int64_t M, int64_t F_x) {
  hw::griddep_wait();
  if (M * F_x % 8 == 0 && hw::aligned(product_2, minimum)) {
    maximum_minimum_minimum_by<8>(product_2, minimum, M, F_x);
  } else {
    maximum_minimum_minimum_by<1>(product_2, minimum, M, F_x);
  }
}

// %y: bf16[M/4, N] = sum(%landing, axis=(0,))
template <int kWidth>
__device__ void sum_y_by(const hw::bf16* landing, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t j : hw::over_grid<kWidth>(M / 4 * N)) {
    auto sum = hw::filled<kWidth, hw::Sum<float>>({});
    for (int64_t i = 0; i < 4; ++i) {
      const auto landing_ij = hw::load<kWidth>(landing + i * (M / 4 * N) + j);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        sum[e] += float(landing_ij[e]);
      }
    }
    hw::Values<hw::bf16, kWidth> y_j;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      y_j[e] = hw::bf16(sum[e]);
    }
    hw::store(y + j, y_j);
  }
}

__global__ void sum_y(const hw::bf16* landing, hw::bf16* y, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M / 4 * N % 8 == 0 && hw::aligned(landing, y)) {
    sum_y_by<8>(landing, y, M, N);
  } else {
    sum_y_by<1>(landing, y, M, N);
  }
}

}  // namespace programs::two_loops
