// Kernels of keys_in_a_loop.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::keys_in_a_loop {

__global__ void concat_y_kv(const hw::bf16* k, const hw::bf16* v, hw::bf16* y_kv, int64_t S);
__global__ void fill_y_lse(float* y_lse, int64_t elements);
__global__ void fused_y_weights_y_sums(const float* y_lse, float* y_weights, float* y_sums, int64_t S);
__global__ void fused_y(const float* y_sums, const float* y_weights, const hw::bf16* y_blocks, hw::bf16* y, int64_t S);

}  // namespace programs::keys_in_a_loop
