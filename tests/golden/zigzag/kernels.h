// Kernels of trained_in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::trained_in_zigzag {

__global__ void reverse_second_in_order_pieces(const hw::bf16* in_order_halves, hw::bf16* in_order_pieces, int64_t S);
__global__ void add_concat_local(const hw::bf16* local_second_lower_half, const hw::bf16* local_first,
                                 const hw::bf16* local_second_upper_half, hw::bf16* local, int64_t S);
__global__ void reverse_second_pieces(const hw::bf16* halves, hw::bf16* pieces, int64_t S);

}  // namespace programs::trained_in_zigzag
