// Kernels of vocabulary.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::vocabulary {

__global__ void fused_table_taken_partial(const int32_t* ids, const hw::bf16* table, hw::bf16* table_taken_partial, int64_t V,
                                          int64_t D, int64_t T, int64_t V_tp, int64_t V_first_tp);
__global__ void fused_where_is_past(const float* scores, float* where_is_past, int64_t S, int64_t T_tp, int64_t T_first_tp);

}  // namespace programs::vocabulary
