#include "types.h"

namespace hostweave::cpu {
namespace {

struct Type {
  const char* name;
  std::size_t size;
};
constexpr Type kTypes[ncclNumTypes] = {
    // by ncclDataType_t
    {"i8", 1},  {"u8", 1},  {"i32", 4}, {"u32", 4},  {"i64", 8},    {"u64", 8},
    {"f16", 2}, {"f32", 4}, {"f64", 8}, {"bf16", 2}, {"f8e4m3", 1}, {"f8e5m2", 1},
};

bool known(ncclDataType_t type) { return type >= 0 && type < ncclNumTypes; }

}  // namespace

std::size_t type_size(ncclDataType_t type) { return known(type) ? kTypes[type].size : 0; }
const char* type_name(ncclDataType_t type) { return known(type) ? kTypes[type].name : "an unknown type"; }

std::size_t type_size(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_64F:
      return 8;
    default:
      return 0;
  }
}

const void* shift(const void* base, std::int64_t elements, cudaDataType_t type) {
  return base ? static_cast<const char*>(base) + elements * static_cast<std::int64_t>(type_size(type)) : nullptr;
}
void* shift(void* base, std::int64_t elements, cudaDataType_t type) {
  return const_cast<void*>(shift(static_cast<const void*>(base), elements, type));
}

}  // namespace hostweave::cpu
