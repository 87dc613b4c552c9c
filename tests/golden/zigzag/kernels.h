// Kernels of trained_in_zigzag.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::trained_in_zigzag {

// %k_in_order_pieces: bf16[2, 2, 4, S/8, 64] = reverse_second(%k_in_order_halves, axis=2, halves=1)
__global__ void reverse_second_k_in_order_pieces(const hw::bf16* k_in_order_halves, hw::bf16* k_in_order_pieces, int64_t S);
// %dk_add: bf16[2, S/2, 64] = add(%dk_half, %dk_first_partial)
__global__ void add_dk_add(const hw::bf16* dk_half, const hw::bf16* dk_first_partial, hw::bf16* dk_add, int64_t S);
// %dk_resharded_pieces: bf16[4, 2, 2, S/8, 64] = reverse_second(%dk_resharded_halves, axis=0, halves=2)
__global__ void reverse_second_dk_resharded_pieces(const hw::bf16* dk_resharded_halves, hw::bf16* dk_resharded_pieces, int64_t S);

}  // namespace programs::trained_in_zigzag
