// Kernels of gated_in_loops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::gated_in_loops {

// %maximum_g: bf16[M, local(F, x)] = maximum(%g, -1.0)
// %minimum_g: bf16[M, local(F, x)] = minimum(%maximum_g, 1.0)
// %h: bf16[M, local(F, x)] = multiply(%minimum_g, %u)
__global__ void maximum_minimum_multiply_h(const hw::bf16* g, const hw::bf16* u, hw::bf16* h, int64_t M, int64_t F_x);
// %y: bf16[M/4, K] = sum(%y_landing, axis=(0,))
__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t K);

}  // namespace programs::gated_in_loops
