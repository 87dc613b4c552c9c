#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_ops {

// %h: bf16[M/3, N] = neg(%x)
// %y: bf16[M/3, N] = mul(%h, %x)
__global__ void neg_mul_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid(M / 3 * N)) {
    const float x_i = float(x[i]);
    const float h = -x_i;
    y[i] = hw::bf16(h * x_i);
  }
}

}  // namespace programs::two_ops
