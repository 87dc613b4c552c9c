#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_stages_streamed {

// %h: bf16[M/4, part(N, x on ranks 0, 1)] = relu(%product)
template <int kWidth>
__device__ void relu_h_by(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N_x_of_ranks_0_1) {
  for (int64_t i : hw::over_grid<kWidth>(M / 4 * N_x_of_ranks_0_1)) {
    const auto product_i = hw::load<kWidth>(product + i);
    hw::Values<hw::bf16, kWidth> h_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float product_e = float(product_i[e]);
      h_i[e] = hw::bf16(product_e < 0.0f ? 0.0f : product_e);
    }
    hw::store(h + i, h_i);
  }
}

__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N_x_of_ranks_0_1) {
  if (M / 4 * N_x_of_ranks_0_1 % 8 == 0 && hw::aligned(product, h)) {
    relu_h_by<8>(product, h, M, N_x_of_ranks_0_1);
  } else {
    relu_h_by<1>(product, h, M, N_x_of_ranks_0_1);
  }
}

// %g: bf16[M/4, part(N, x on ranks 2, 3)] = relu(%product_3)
template <int kWidth>
__device__ void relu_g_by(const hw::bf16* product_3, hw::bf16* g, int64_t M, int64_t N_x_of_ranks_2_3) {
  for (int64_t i : hw::over_grid<kWidth>(M / 4 * N_x_of_ranks_2_3)) {
    const auto product_3_i = hw::load<kWidth>(product_3 + i);
    hw::Values<hw::bf16, kWidth> g_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float product_3_e = float(product_3_i[e]);
      g_i[e] = hw::bf16(product_3_e < 0.0f ? 0.0f : product_3_e);
    }
    hw::store(g + i, g_i);
  }
}

__global__ void relu_g(const hw::bf16* product_3, hw::bf16* g, int64_t M, int64_t N_x_of_ranks_2_3) {
  if (M / 4 * N_x_of_ranks_2_3 % 8 == 0 && hw::aligned(product_3, g)) {
    relu_g_by<8>(product_3, g, M, N_x_of_ranks_2_3);
  } else {
    relu_g_by<1>(product_3, g, M, N_x_of_ranks_2_3);
  }
}

}  // namespace programs::two_stages_streamed
