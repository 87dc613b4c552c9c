#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_stages {

// %h: bf16[part(M, x on ranks 0, 1), N] = relu(%product)
template <int kWidth>
__device__ void relu_h_by(const hw::bf16* product, hw::bf16* h, int64_t N, int64_t M_x_of_ranks_0_1) {
  for (int64_t i : hw::over_grid<kWidth>(N * M_x_of_ranks_0_1)) {
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

__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t N, int64_t M_x_of_ranks_0_1) {
  if (N * M_x_of_ranks_0_1 % 8 == 0 && hw::aligned(product, h)) {
    relu_h_by<8>(product, h, N, M_x_of_ranks_0_1);
  } else {
    relu_h_by<1>(product, h, N, M_x_of_ranks_0_1);
  }
}

}  // namespace programs::two_stages
