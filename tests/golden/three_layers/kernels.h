// Kernels of three_layers.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::three_layers {

__global__ void maximum_minimum_h(const hw::bf16* matmul_w_in, hw::bf16* h, int64_t elements);
__global__ void fused_y(const hw::bf16* scattered_landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E);

}  // namespace programs::three_layers
