#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_stages_streamed {

// %h: bf16[M/4, part(N, x on ranks 0, 1)] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N_x_of_ranks_0_1) {
  for (int64_t i : hw::over_grid(M / 4 * N_x_of_ranks_0_1)) {
    const float product_i = float(product[i]);
    h[i] = hw::bf16(product_i < 0.0f ? 0.0f : product_i);
  }
}

// %g: bf16[M/4, part(N, x on ranks 2, 3)] = relu(%product_3)
__global__ void relu_g(const hw::bf16* product_3, hw::bf16* g, int64_t M, int64_t N_x_of_ranks_2_3) {
  for (int64_t i : hw::over_grid(M / 4 * N_x_of_ranks_2_3)) {
    const float product_3_i = float(product_3[i]);
    g[i] = hw::bf16(product_3_i < 0.0f ? 0.0f : product_3_i);
  }
}

}  // namespace programs::two_stages_streamed
