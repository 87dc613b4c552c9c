// Kernels of two_stages.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_stages {

// %h: bf16[part(M, x on ranks 0, 1), N] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t N, int64_t M_x_of_ranks_0_1);

}  // namespace programs::two_stages
