// Element types: sizes, and conversions of the narrow ones to and from float.
#pragma once
#include <cstddef>
#include <cstdint>

#include "nccl.h"

namespace hostweave::cpu {

std::size_t type_size(ncclDataType_t type);
std::size_t type_size(cudaDataType_t type);  // 0: not supported
const char* type_name(ncclDataType_t type);

// OCP 8-bit floats; encoding saturates, as the GPU does.
float decode_e4m3(std::uint8_t bits);
float decode_e5m2(std::uint8_t bits);
std::uint8_t encode_e4m3(float value);
std::uint8_t encode_e5m2(float value);

}  // namespace hostweave::cpu
