// Kernels of in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::in_zigzag {

// %dst: f32[4, S/2] = fill(value=-inf)
__global__ void fill_y_attention_lse_i_own(float* dst, int64_t S);
// %y_attention_max: f32[1, 4, S/2] = max(%y_attention_lse, axis=(0,), keepdims=true)
// %y_attention_maximum: f32[1, 4, S/2] = maximum(%y_attention_max, -1e+30)
// %y_attention_subtract: f32[2, 4, S/2] = subtract(%y_attention_lse, %y_attention_maximum)
// %y_attention_exp: f32[2, 4, S/2] = exp(%y_attention_subtract)
// %y_attention_sum: f32[1, 4, S/2] = sum(%y_attention_exp, axis=(0,), keepdims=true)
// %y_attention_maximum_2: f32[1, 4, S/2] = maximum(%y_attention_sum, 1.0)
__global__ void fused_y_attention_maximum_y_attention_maximum_2(const float* y_attention_lse, float* y_attention_maximum,
                                                                float* y_attention_maximum_2, int64_t S);
// %y_attention_subtract_2: f32[2, 4, S/2] = subtract(%y_attention_lse, %y_attention_maximum)
// %y_attention_exp_2: f32[2, 4, S/2] = exp(%y_attention_subtract_2)
// %y_attention_divide: f32[2, 4, S/2] = divide(%y_attention_exp_2, %y_attention_maximum_2)
__global__ void subtract_exp_divide_y_attention_divide(const float* y_attention_lse, const float* y_attention_maximum,
                                                       const float* y_attention_maximum_2, float* y_attention_divide, int64_t S);
// %y_attention_astype: f32[2, 4, S/2, 64] = astype(%y_attention_blocks)
// %y_attention_multiply: f32[2, 4, S/2, 64] = multiply(%y_attention_astype, %y_attention_expand_dims)
// %y_attention_greater: bool[2, 4, S/2, 1] = greater(%y_attention_expand_dims, 0.0)
// %y_attention_where: f32[2, 4, S/2, 64] = where(%y_attention_greater, %y_attention_multiply, 0.0)
// %y_attention_sum_2: f32[4, S/2, 64] = sum(%y_attention_where, axis=(0,))
// %y_attention: bf16[4, S/2, 64] = astype(%y_attention_sum_2)
__global__ void fused_y_attention(const hw::bf16* y_attention_blocks, const float* y_attention_expand_dims, hw::bf16* y_attention,
                                  int64_t outermost);

}  // namespace programs::in_zigzag
