// Kernels of halves.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::halves {

__global__ void negative_concat_joined(const hw::bf16* x_sliced, const hw::bf16* x_from_4, const hw::bf16* h_sliced,
                                       const hw::bf16* h_from_1, hw::bf16* joined, int64_t M_x);
__global__ void relu_pad_relu_x_padded(const hw::bf16* x_from_1, hw::bf16* relu_x_padded, int64_t M_x);

}  // namespace programs::halves
