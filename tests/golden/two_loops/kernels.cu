#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_loops {

// %maximum_v: bf16[M, local(F, x)] = maximum(%matmul_v, -1.0)
// %g: bf16[M, local(F, x)] = minimum(%maximum_v, 1.0)
template <int kWidth>
__device__ void maximum_minimum_g_by(const hw::bf16* matmul_v, hw::bf16* g, int64_t M, int64_t F_x) {
  for (int64_t i : hw::over_grid<kWidth>(M * F_x)) {
    const auto matmul_v_i = hw::load<kWidth>(matmul_v + i);
    hw::Values<hw::bf16, kWidth> g_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float matmul_v_e = float(matmul_v_i[e]);
      const float maximum_v = (matmul_v_e > (-1.0f) || matmul_v_e != matmul_v_e) ? matmul_v_e : (-1.0f);
      g_i[e] = hw::bf16((maximum_v < 1.0f || maximum_v != maximum_v) ? maximum_v : 1.0f);
    }
    hw::store(g + i, g_i);
  }
}

__global__ void maximum_minimum_g(const hw::bf16* matmul_v, hw::bf16* g, int64_t M, int64_t F_x) {
  hw::griddep_wait();
  if (M * F_x % 8 == 0 && hw::aligned(matmul_v, g)) {
    maximum_minimum_g_by<8>(matmul_v, g, M, F_x);
  } else {
    maximum_minimum_g_by<1>(matmul_v, g, M, F_x);
  }
}

// %y: bf16[M/4, N] = sum(%y_landing, axis=(0,))
template <int kWidth>
__device__ void sum_y_by(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t j : hw::over_grid<kWidth>(M / 4 * N)) {
    auto sum = hw::filled<kWidth, hw::Sum<float>>({});
    for (int64_t i = 0; i < 4; ++i) {
      const auto y_landing_ij = hw::load<kWidth>(y_landing + i * (M / 4 * N) + j);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        sum[e] += float(y_landing_ij[e]);
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

__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M / 4 * N % 8 == 0 && hw::aligned(y_landing, y)) {
    sum_y_by<8>(y_landing, y, M, N);
  } else {
    sum_y_by<1>(y_landing, y, M, N);
  }
}

}  // namespace programs::two_loops
