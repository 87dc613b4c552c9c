#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_outputs {

// %y: bf16[part(M, x), N] = add(%x, %b)
// %z: bf16[part(M, x)] = sum(%y, axis=(1,))
__global__ void add_sum_y_z(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x) {
  for (int64_t i : hw::over_blocks(M_x)) {
    float sum = 0;
    for (int64_t j : hw::over_threads(N)) {
      const float y_ij = float(x[i * N + j]) + float(b[j]);
      sum += y_ij;
      y[i * N + j] = hw::bf16(y_ij);
    }
    sum = hw::reduce_block(sum, hw::Add());
    if (hw::first_thread()) {
      z[i] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::two_outputs
