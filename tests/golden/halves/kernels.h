// Kernels of halves.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::halves {

__global__ void negative_x_kernel(const hw::bf16* x_sliced_2, hw::bf16* negative_x, int64_t M_x);
__global__ void copy_joined_2(const hw::bf16* src, hw::bf16* dst, int64_t M_x);
__global__ void relu_x_kernel(const hw::bf16* x_sliced_3, hw::bf16* relu_x, int64_t M_x);
__global__ void fill_relu_x_padded_before(hw::bf16* dst, int64_t M_x);

}  // namespace programs::halves
