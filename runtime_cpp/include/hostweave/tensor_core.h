// Tensor core instructions of GPUs since Ampere, and instructions that copy operands to shared memory, and to registers.
#pragma once
#include "hostweave/types.h"

namespace hw {

#ifdef __CUDACC__

// Adds the product of a 16 x 16 and a 16 x 8 matrix to a 16 x 8 matrix. Each thread of a warp passes 8, 4 and 4 elements of these
// matrices.
#define HW_MULTIPLY_ADD(T, name)                                                                                             \
  __device__ inline void multiply_add(float& x, float& y, float& z, float& w, const uint4& a, unsigned b0, unsigned b1, T) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                                               \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                               \
        : "+f"(x), "+f"(y), "+f"(z), "+f"(w)                                                                                 \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                                                         \
  }
HW_MULTIPLY_ADD(f16, "f16")
HW_MULTIPLY_ADD(bf16, "bf16")
#undef HW_MULTIPLY_ADD

__device__ inline unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// Loads four 8 x 8 matrices from shared memory. Thread i of a warp passes the address of row i % 8 of matrix i / 8. Each thread
// gets two elements of each matrix.
template <bool kTransposed>
__device__ uint4 load_matrices(const void* row) {
  uint4 to;
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(shared_address(row))
                 : "memory");
  }
  return to;
}

// Starts to fill 16 bytes of shared memory: copies `bytes` bytes, and sets the remaining bytes to zero.
__device__ inline void copy_to_shared(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

#endif

}  // namespace hw
