// Kernels of in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::in_zigzag {

__global__ void concat_y_attention_packed(const hw::bf16* y_keys, const hw::bf16* y_values, hw::bf16* y_attention_packed,
                                          int64_t S);
__global__ void fill_y_attention_lse(float* dst, int64_t S);
__global__ void fused_y_attention_maximum_y_attention_sum(const float* y_attention_lse, float* y_attention_maximum,
                                                          float* y_attention_sum, int64_t S);
__global__ void subtract_exp_y_attention_exp_2(const float* y_attention_lse, const float* y_attention_maximum,
                                               float* y_attention_exp_2, int64_t S);
__global__ void fused_y_attention(const float* y_attention_sum, const float* y_attention_exp_2,
                                  const hw::bf16* y_attention_blocks, hw::bf16* y_attention, int64_t rows);

}  // namespace programs::in_zigzag
