// Kernels of ag_matmul_beside_sums.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::ag_matmul_beside_sums {

__global__ void sum_s_partial(const hw::bf16* x, hw::bf16* s_partial, int64_t M, int64_t K);

}  // namespace programs::ag_matmul_beside_sums
