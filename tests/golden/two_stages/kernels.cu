#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_stages {

// %h: bf16[part(M, x on ranks 0, 1), N] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t N, int64_t M_x_of_ranks_0_1) {
  for (int64_t i : hw::over_grid(N * M_x_of_ranks_0_1)) {
    const float product_i = float(product[i]);
    h[i] = hw::bf16(product_i < 0.0f ? 0.0f : product_i);
  }
}

}  // namespace programs::two_stages
