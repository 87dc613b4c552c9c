#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::allreduce_rows {

// %y_partial: bf16[N/3] = sum(%x, axis=(0,))
__global__ void sum_y_partial(const hw::bf16* x, hw::bf16* y_partial, int64_t N, int64_t R_x) {
  for (const hw::Lane j : hw::over_lanes(N / 3)) {
    float sum = 0;
    for (int64_t i : hw::over_warps(R_x)) {
      sum += float(x[i * N + j]);
    }
    sum = hw::reduce_warps(sum, hw::Add());
    if (j.stores()) {
      y_partial[j] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::allreduce_rows
