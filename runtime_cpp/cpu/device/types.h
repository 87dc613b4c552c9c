// Element types: names, sizes and pointer arithmetic.
#pragma once
#include <cstddef>
#include <cstdint>

#include "nccl.h"

namespace hostweave::cpu {

struct Type {
  const char* name;
  std::size_t size;
};
constexpr Type kTypes[ncclNumTypes] = {
    // by ncclDataType_t
    {"i8", 1},  {"u8", 1},  {"i32", 4}, {"u32", 4},  {"i64", 8},    {"u64", 8},
    {"f16", 2}, {"f32", 4}, {"f64", 8}, {"bf16", 2}, {"f8e4m3", 1}, {"f8e5m2", 1},
};

constexpr Type type_of(ncclDataType_t type) {
  return type >= 0 && type < ncclNumTypes ? kTypes[type] : Type{"an unknown type", 0};
}
constexpr std::size_t type_size(ncclDataType_t type) { return type_of(type).size; }  // 0: unsupported
constexpr const char* type_name(ncclDataType_t type) { return type_of(type).name; }

constexpr std::size_t type_size(cudaDataType_t type) {
  if (type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2) return 1;
  return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : type == CUDA_R_16F || type == CUDA_R_16BF ? 2 : 0;
}

// Advances a pointer by elements.
inline void* shift(const void* base, std::int64_t elements, cudaDataType_t type) {
  return base ? const_cast<char*>(static_cast<const char*>(base)) + elements * static_cast<std::int64_t>(type_size(type))
              : nullptr;
}

}  // namespace hostweave::cpu
