// Kernels of matmul_rs_put.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::matmul_rs_put {

// %term_0: f32[M/4, N] = astype(%matmul_w_own)
// %term_1: f32[M/4, N] = astype(%y_landing_0)
// %term_2: f32[M/4, N] = add(%term_0, %term_1)
// %term_3: f32[M/4, N] = astype(%y_landing_1)
// %term_4: f32[M/4, N] = add(%term_2, %term_3)
// %term_5: f32[M/4, N] = astype(%y_landing_2)
// %term_6: f32[M/4, N] = add(%term_4, %term_5)
// %y: bf16[M/4, N] = astype(%term_6)
__global__ void fused_y(const hw::bf16* matmul_w_own, const hw::bf16* y_landing_0, const hw::bf16* y_landing_1,
                        const hw::bf16* y_landing_2, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::matmul_rs_put
