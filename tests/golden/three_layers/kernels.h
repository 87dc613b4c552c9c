// Kernels of three_layers.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::three_layers {

// %maximum_w_in: bf16[M, local(F, x)] = maximum(%matmul_w_in, -1.0)
// %h: bf16[M, local(F, x)] = minimum(%maximum_w_in, 1.0)
__global__ void maximum_minimum_h(const hw::bf16* matmul_w_in, hw::bf16* h, int64_t M, int64_t F_x);
// %scattered: bf16[M/4, E] = sum(%scattered_landing, axis=(0,))
// %add_x: bf16[M/4, E] = add(%x, %scattered)
// %maximum_x: bf16[M/4, E] = maximum(%add_x, -1.0)
// %y: bf16[M/4, E] = minimum(%maximum_x, 1.0)
__global__ void fused_y(const hw::bf16* scattered_landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E);

}  // namespace programs::three_layers
