#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::ag_matmul_beside_sums {

// %s_partial: bf16[K] = sum(%x, axis=(0,))
__global__ void sum_s_partial(const hw::bf16* x, hw::bf16* s_partial, int64_t M, int64_t K) {
  for (const hw::Lane j : hw::over_lanes(K)) {
    float sum = 0;
    for (int64_t i : hw::over_warps(M / 4)) {
      sum += float(x[i * K + j]);
    }
    sum = hw::reduce_warps(sum, hw::Add());
    if (j.stores()) {
      s_partial[j] = hw::bf16(sum);
    }
  }
}

// %t_partial: bf16[L] = sum(%v, axis=(0,))
__global__ void sum_t_partial(const hw::bf16* v, hw::bf16* t_partial, int64_t M, int64_t L) {
  for (const hw::Lane j : hw::over_lanes(L)) {
    float sum = 0;
    for (int64_t i : hw::over_warps(M / 4)) {
      sum += float(v[i * L + j]);
    }
    sum = hw::reduce_warps(sum, hw::Add());
    if (j.stores()) {
      t_partial[j] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::ag_matmul_beside_sums
