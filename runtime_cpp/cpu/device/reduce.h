// Element-wise reductions of the collectives.
#pragma once
#include <cstddef>
#include <vector>

#include "nccl.h"

namespace hostweave::cpu {

// out[i] = reduction over all inputs, for elements [begin, end) of every array; every out gets the same. All of a
// piece is read before any of it is written, so an output may be an input. Narrow floats accumulate in float.
void reduce(ncclDataType_t type, ncclRedOp_t reduction, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
            std::size_t begin, std::size_t end);

}  // namespace hostweave::cpu
