// Kernels of add.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::add {

// %y: bf16[M/3, N] = add(%a, %b)
__global__ void add_y(const hw::bf16* a, const hw::bf16* b, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::add
