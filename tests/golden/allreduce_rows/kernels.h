// Kernels of allreduce_rows.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::allreduce_rows {

__global__ void sum_y_partial(const hw::bf16* x, hw::bf16* y_partial, int64_t N, int64_t R_x);

}  // namespace programs::allreduce_rows
