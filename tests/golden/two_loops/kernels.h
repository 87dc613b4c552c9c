// Kernels of two_loops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_loops {

// %maximum: bf16[M, part(F, x)] = maximum(%product_2, -1.0)
// %minimum: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
__global__ void maximum_minimum_minimum(const hw::bf16* product_2, hw::bf16* minimum, int64_t M, int64_t F_x);
// %y: bf16[M/4, N] = sum(%landing, axis=(0,))
__global__ void sum_y(const hw::bf16* landing, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::two_loops
