// Kernels of two_outputs.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::two_outputs {

// %y: bf16[local(M, x), N] = add(%x, %b)
// %z: bf16[local(M, x)] = sum(%y, axis=(1,))
__global__ void add_sum_y_z(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x);

}  // namespace programs::two_outputs
