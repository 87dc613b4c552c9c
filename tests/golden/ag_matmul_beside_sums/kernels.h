// Kernels of ag_matmul_beside_sums.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::ag_matmul_beside_sums {

// %s_partial: bf16[K] = sum(%x, axis=(0,))
__global__ void sum_s_partial(const hw::bf16* x, hw::bf16* s_partial, int64_t M, int64_t K);
// %t_partial: bf16[L] = sum(%v, axis=(0,))
__global__ void sum_t_partial(const hw::bf16* v, hw::bf16* t_partial, int64_t M, int64_t L);

}  // namespace programs::ag_matmul_beside_sums
