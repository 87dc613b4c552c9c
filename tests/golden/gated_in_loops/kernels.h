// Kernels of gated_in_loops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::gated_in_loops {

__global__ void maximum_minimum_multiply_h(const hw::bf16* g, const hw::bf16* u, hw::bf16* h, int64_t elements);
__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t K);

}  // namespace programs::gated_in_loops
