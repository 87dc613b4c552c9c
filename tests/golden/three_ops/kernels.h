// Kernels of three_ops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::three_ops {

__global__ void negative_a(const hw::bf16* x, hw::bf16* a, int64_t elements);
__global__ void multiply_b(const hw::bf16* a, const hw::bf16* x, hw::bf16* b, int64_t elements);
__global__ void add_y(const hw::bf16* b, const hw::bf16* x, hw::bf16* y, int64_t elements);

}  // namespace programs::three_ops
