#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::ag_matmul_beside_sums {

// %s_partial: bf16[K] = sum(%x, axis=(0,))
__global__ void sum_s_partial(const hw::bf16* x, hw::bf16* s_partial, int64_t M, int64_t K) {
  for (int64_t j : hw::over_grid(K)) {
    float sum = 0;
    for (int64_t i = 0; i < M / 4; ++i) {
      sum += float(x[i * K + j]);
    }
    s_partial[j] = hw::bf16(sum);
  }
}

// %t_partial: bf16[L] = sum(%v, axis=(0,))
__global__ void sum_t_partial(const hw::bf16* v, hw::bf16* t_partial, int64_t M, int64_t L) {
  for (int64_t j : hw::over_grid(L)) {
    float sum = 0;
    for (int64_t i = 0; i < M / 4; ++i) {
      sum += float(v[i * L + j]);
    }
    t_partial[j] = hw::bf16(sum);
  }
}

}  // namespace programs::ag_matmul_beside_sums
