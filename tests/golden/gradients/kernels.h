// Kernels of gradients.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::gradients {

__global__ void sum_db_partial(const hw::bf16* dy, hw::bf16* db_partial, int64_t N, int64_t T_x);

}  // namespace programs::gradients
