#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_loops {

// %maximum_v: bf16[M, local(F, x)] = maximum(%matmul_v, -1.0)
// %g: bf16[M, local(F, x)] = minimum(%maximum_v, 1.0)
__global__ void maximum_minimum_g(const hw::bf16* matmul_v, hw::bf16* g, int64_t elements) {
  HW_TOUCHES(hw::reads(matmul_v, elements), hw::writes(g, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto matmul_v_i = hw::load<kWidth>(matmul_v + i);
      hw::Values<hw::bf16, kWidth> g_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float matmul_v_e = matmul_v_i.f32(e);
        const float maximum_v = (matmul_v_e > -1.0f || matmul_v_e != matmul_v_e) ? matmul_v_e : -1.0f;
        g_i[e] = hw::bf16((maximum_v < 1.0f || maximum_v != maximum_v) ? maximum_v : 1.0f);
      }
      hw::store(g + i, g_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(matmul_v, g)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y: bf16[M/4, N] = sum(%y_landing, axis=(0,))
__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t N) {
  HW_TOUCHES(hw::reads(y_landing, M * N), hw::writes(y, M / 4 * N));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t j : hw::over_grid<kWidth>(M / 4 * N)) {
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t i = 0; i < 4; ++i) {
        const auto y_landing_ij = hw::load<kWidth>(y_landing + i * (M / 4 * N) + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sum[e] += y_landing_ij.f32(e);
        }
      }
      hw::Values<hw::bf16, kWidth> y_j;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_j[e] = hw::bf16(sum[e]);
      }
      hw::store(y + j, y_j);
    }
  };
  if (M / 4 * N % 8 == 0 && hw::aligned(y_landing, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::two_loops
