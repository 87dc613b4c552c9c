// Kernels of keys_in_a_loop.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::keys_in_a_loop {

__global__ void concat_y_packed(const hw::bf16* k, const hw::bf16* v, hw::bf16* y_packed, int64_t S);
__global__ void fill_y_lse(float* dst, int64_t S);
__global__ void fused_y_maximum_y_sum(const float* y_lse, float* y_maximum, float* y_sum, int64_t S);
__global__ void subtract_exp_y_exp_2(const float* y_lse, const float* y_maximum, float* y_exp_2, int64_t S);
__global__ void fused_y(const float* y_sum, const float* y_exp_2, const hw::bf16* y_blocks, hw::bf16* y, int64_t S);

}  // namespace programs::keys_in_a_loop
