// Kernels of two_ops.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_ops {

__global__ void negative_multiply_y(const hw::bf16* x, hw::bf16* y, int64_t elements);

}  // namespace programs::two_ops
