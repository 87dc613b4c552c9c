// Kernels of two_loops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_loops {

__global__ void maximum_minimum_g(const hw::bf16* matmul_v, hw::bf16* g, int64_t elements);
__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::two_loops
