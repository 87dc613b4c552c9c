// Kernels of two_outputs.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_outputs {

__global__ void add_sum_y_z(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x);

}  // namespace programs::two_outputs
