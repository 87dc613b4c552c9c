// Kernels of three_layers.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::three_layers {

// %maximum: bf16[M, part(F, x)] = maximum(%product, -1.0)
// %h: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
__global__ void maximum_minimum_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t F_x);
// %scattered: bf16[M/4, E] = sum(%landing, axis=(0,))
// %add: bf16[M/4, E] = add(%x, %scattered)
// %maximum_2: bf16[M/4, E] = maximum(%add, -1.0)
// %y: bf16[M/4, E] = minimum(%maximum_2, 1.0)
__global__ void fused_y(const hw::bf16* landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E);

}  // namespace programs::three_layers
