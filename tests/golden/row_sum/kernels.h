// Kernels of row_sum.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::row_sum {

__global__ void sum_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::row_sum
