// Kernels of two_stages.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_stages {

// %h: bf16[M/2, N] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N);

}  // namespace programs::two_stages
