// Kernels of in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::in_zigzag {

__global__ void concat_y_attention_kv(const hw::bf16* y_keys, const hw::bf16* y_values, hw::bf16* y_attention_kv, int64_t S);
__global__ void fill_y_attention_lse(float* y_attention_lse, int64_t elements);
__global__ void fused_y_attention_weights_y_attention_sums(const float* y_attention_lse, float* y_attention_weights,
                                                           float* y_attention_sums, int64_t S);
__global__ void fused_y_attention(const float* y_attention_sums, const float* y_attention_weights,
                                  const hw::bf16* y_attention_blocks, hw::bf16* y_attention, int64_t rows);

}  // namespace programs::in_zigzag
