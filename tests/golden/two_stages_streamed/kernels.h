// Kernels of two_stages_streamed.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_stages_streamed {

// %h: bf16[M/4, N/2] = relu(%product)
__global__ void relu_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t N);

}  // namespace programs::two_stages_streamed
