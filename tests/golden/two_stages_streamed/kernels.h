// Kernels of two_stages_streamed.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_stages_streamed {

// %h: bf16[M/4, part(N, x on ranks 0, 1)] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N_x_of_ranks_0_1);
// %g: bf16[M/4, part(N, x on ranks 2, 3)] = relu(%product_3)
__global__ void relu_g(const hw::bf16* product_3, hw::bf16* g, int64_t M, int64_t N_x_of_ranks_2_3);

}  // namespace programs::two_stages_streamed
