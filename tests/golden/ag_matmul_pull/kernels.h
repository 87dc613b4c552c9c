// Kernels of ag_matmul_pull.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::ag_matmul_pull {

__global__ void relu_h(const hw::bf16* x, hw::bf16* h, int64_t elements);

}  // namespace programs::ag_matmul_pull
