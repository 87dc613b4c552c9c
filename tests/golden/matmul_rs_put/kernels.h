// Kernels of matmul_rs_put.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::matmul_rs_put {

__global__ void fused_y(const hw::bf16* matmul_w_own, const hw::bf16* y_landing_0, const hw::bf16* y_landing_1,
                        const hw::bf16* y_landing_2, hw::bf16* y, int64_t elements);

}  // namespace programs::matmul_rs_put
