// Kernels of trained_in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::trained_in_zigzag {

__global__ void reverse_second_k_in_order_pieces(const hw::bf16* k_in_order_halves, hw::bf16* k_in_order_pieces, int64_t S);
__global__ void add_concat_dk_before(const hw::bf16* dk_before_first_half, const hw::bf16* dk_before_first_partial,
                                     const hw::bf16* dk_before_second_half, hw::bf16* dk_before, int64_t S);
__global__ void reverse_second_dk_pieces(const hw::bf16* dk_halves, hw::bf16* dk_pieces, int64_t S);

}  // namespace programs::trained_in_zigzag
