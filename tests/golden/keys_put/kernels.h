// Kernels of keys_in_a_loop.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::keys_in_a_loop {

// %dst: f32[2, S/4] = fill(value=-inf)
__global__ void fill_y_lse_i_own(float* dst, int64_t S);
// %y_max: f32[1, 2, S/4] = max(%y_lse, axis=(0,), keepdims=true)
// %y_maximum: f32[1, 2, S/4] = maximum(%y_max, -1e+30)
// %y_subtract: f32[4, 2, S/4] = subtract(%y_lse, %y_maximum)
// %y_exp: f32[4, 2, S/4] = exp(%y_subtract)
// %y_sum: f32[1, 2, S/4] = sum(%y_exp, axis=(0,), keepdims=true)
// %y_maximum_2: f32[1, 2, S/4] = maximum(%y_sum, 1.0)
__global__ void fused_y_maximum_y_maximum_2(const float* y_lse, float* y_maximum, float* y_maximum_2, int64_t S);
// %y_subtract_2: f32[4, 2, S/4] = subtract(%y_lse, %y_maximum)
// %y_exp_2: f32[4, 2, S/4] = exp(%y_subtract_2)
// %y_divide: f32[4, 2, S/4] = divide(%y_exp_2, %y_maximum_2)
__global__ void subtract_exp_divide_y_divide(const float* y_lse, const float* y_maximum, const float* y_maximum_2,
                                             float* y_divide, int64_t S);
// %y_astype: f32[4, 2, S/4, 64] = astype(%y_blocks)
// %y_multiply: f32[4, 2, S/4, 64] = multiply(%y_astype, %y_expand_dims)
// %y_greater: bool[4, 2, S/4, 1] = greater(%y_expand_dims, 0.0)
// %y_where: f32[4, 2, S/4, 64] = where(%y_greater, %y_multiply, 0.0)
// %y_sum_2: f32[2, S/4, 64] = sum(%y_where, axis=(0,))
// %y: bf16[2, S/4, 64] = astype(%y_sum_2)
__global__ void fused_y(const hw::bf16* y_blocks, const float* y_expand_dims, hw::bf16* y, int64_t S);

}  // namespace programs::keys_in_a_loop
