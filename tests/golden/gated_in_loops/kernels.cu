#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::gated_in_loops {

// %maximum_g: bf16[M, local(F, x)] = maximum(%g, -1.0)
// %minimum_g: bf16[M, local(F, x)] = minimum(%maximum_g, 1.0)
// %h: bf16[M, local(F, x)] = multiply(%minimum_g, %u)
__global__ void maximum_minimum_multiply_h(const hw::bf16* g, const hw::bf16* u, hw::bf16* h, int64_t elements) {
  HW_TOUCHES(hw::reads(g, elements), hw::reads(u, elements), hw::writes(h, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto g_i = hw::load<kWidth>(g + i);
      const auto u_i = hw::load<kWidth>(u + i);
      hw::Values<hw::bf16, kWidth> h_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float g_e = g_i.f32(e);
        const float maximum_g = (g_e > -1.0f || g_e != g_e) ? g_e : -1.0f;
        const float minimum_g = (maximum_g < 1.0f || maximum_g != maximum_g) ? maximum_g : 1.0f;
        h_i[e] = hw::bf16(minimum_g * u_i.f32(e));
      }
      hw::store(h + i, h_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(g, u, h)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y: bf16[M/4, K] = sum(%y_landing, axis=(0,))
__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t K) {
  HW_TOUCHES(hw::reads(y_landing, M * K), hw::writes(y, M / 4 * K));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t j : hw::over_grid<kWidth>(M / 4 * K)) {
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t i = 0; i < 4; ++i) {
        const auto y_landing_ij = hw::load<kWidth>(y_landing + i * (M / 4 * K) + j);
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
  if (M / 4 * K % 8 == 0 && hw::aligned(y_landing, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::gated_in_loops
