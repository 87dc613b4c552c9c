#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::row_sum {

// %y: bf16[M/3] = sum(%x, axis=(1,))
__global__ void sum_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_blocks(M / 3)) {
    float sum = 0;
    for (int64_t j : hw::over_threads(N)) {
      sum += float(x[i * N + j]);
    }
    sum = hw::reduce_block(sum, hw::Add());
    if (hw::first_thread()) {
      y[i] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::row_sum
