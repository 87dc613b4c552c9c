// Kernels of add.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::add {

__global__ void add_y(const hw::bf16* a, const hw::bf16* b, hw::bf16* y, int64_t elements);

}  // namespace programs::add
