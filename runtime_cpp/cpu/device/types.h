// Element types: sizes, names and distances.
#pragma once
#include <cstddef>
#include <cstdint>

#include "nccl.h"

namespace hostweave::cpu {

std::size_t type_size(ncclDataType_t type);  // 0: not supported
std::size_t type_size(cudaDataType_t type);
const char* type_name(ncclDataType_t type);

// So many elements further on.
const void* shift(const void* base, std::int64_t elements, cudaDataType_t type);
void* shift(void* base, std::int64_t elements, cudaDataType_t type);

}  // namespace hostweave::cpu
