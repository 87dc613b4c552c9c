// Kernels of matmul_rs_flat.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::matmul_rs_flat {

__global__ void sum_y(const hw::bf16* y_landing, hw::bf16* y, int64_t M, int64_t N);

}  // namespace programs::matmul_rs_flat
