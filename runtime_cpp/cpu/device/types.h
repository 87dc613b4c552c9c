// Element types: sizes and names.
#pragma once
#include <cstddef>

#include "nccl.h"

namespace hostweave::cpu {

std::size_t type_size(ncclDataType_t type);  // 0: not supported
std::size_t type_size(cudaDataType_t type);
const char* type_name(ncclDataType_t type);

}  // namespace hostweave::cpu
