#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::matmul_rs_flat {

// %y: bf16[M/4, N] = sum(%landing, axis=(0,))
__global__ void sum_y(const hw::bf16* landing, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t j : hw::over_grid(M / 4 * N)) {
    float sum = 0;
    for (int64_t i = 0; i < 4; ++i) {
      sum += float(landing[i * (M / 4 * N) + j]);
    }
    y[j] = hw::bf16(sum);
  }
}

}  // namespace programs::matmul_rs_flat
