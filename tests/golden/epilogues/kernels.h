// Kernels of epilogues.
#pragma once
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace programs::epilogues {

__global__ void maximum_minimum_c(const hw::bf16* s, hw::bf16* c, int64_t elements);

}  // namespace programs::epilogues
