#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::gradients_aside {

// %db_partial: bf16[N] = sum(%dy, axis=(0,))
__global__ void sum_db_partial(const hw::bf16* dy, hw::bf16* db_partial, int64_t N, int64_t T_x) {
  for (const hw::Lane j : hw::over_lanes(N)) {
    float sum = 0;
    for (int64_t i : hw::over_warps(T_x)) {
      sum += float(dy[i * N + j]);
    }
    sum = hw::reduce_warps(sum, hw::Add());
    if (j.stores()) {
      db_partial[j] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::gradients_aside
