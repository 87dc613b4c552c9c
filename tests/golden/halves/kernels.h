// Kernels of halves.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::halves {

// %negative: bf16[part(M, x), 4] = negative(%sliced_2)
__global__ void negative_negative(const hw::bf16* sliced_2, hw::bf16* negative, int64_t M_x);
// %dst: bf16[part(M, x), 2] = copy(%src)
__global__ void copy_y0_2(const hw::bf16* src, hw::bf16* dst, int64_t M_x);
// %relu: bf16[part(M, x), 2] = relu(%sliced_5)
__global__ void relu_relu(const hw::bf16* sliced_5, hw::bf16* relu, int64_t M_x);
// %dst: bf16[part(M, x), 1] = fill(value=1.0)
__global__ void fill_y1_before(hw::bf16* dst, int64_t M_x);

}  // namespace programs::halves
