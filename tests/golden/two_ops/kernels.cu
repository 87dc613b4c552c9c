#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_ops {

// %h: bf16[M/3, N] = negative(%x)
// %y: bf16[M/3, N] = multiply(%h, %x)
template <int kWidth>
__device__ void negative_multiply_y_by(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid<kWidth>(M / 3 * N)) {
    const auto x_i = hw::load<kWidth>(x + i);
    hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float x_e = float(x_i[e]);
      const float h = -x_e;
      y_i[e] = hw::bf16(h * x_e);
    }
    hw::store(y + i, y_i);
  }
}

__global__ void negative_multiply_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M / 3 * N % 8 == 0 && hw::aligned(x, y)) {
    negative_multiply_y_by<8>(x, y, M, N);
  } else {
    negative_multiply_y_by<1>(x, y, M, N);
  }
}

}  // namespace programs::two_ops
