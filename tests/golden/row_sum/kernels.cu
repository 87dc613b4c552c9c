#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::row_sum {

// %y: bf16[M/3] = sum(%x, axis=(1,))
template <int kWidth>
__device__ void sum_y_by(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_blocks(M / 3)) {
    hw::Sum<float> sum = {};
    for (int64_t j : hw::over_threads<kWidth>(N)) {
      const auto x_ij = hw::load<kWidth>(x + i * N + j);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        sum += float(x_ij[e]);
      }
    }
    sum = hw::reduce_block(sum, hw::Add());
    if (hw::first_thread()) {
      y[i] = hw::bf16(sum);
    }
  }
}

__global__ void __launch_bounds__(hw::kRowThreads) sum_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (N % 8 == 0 && hw::aligned(x)) {
    sum_y_by<8>(x, y, M, N);
  } else {
    sum_y_by<1>(x, y, M, N);
  }
}

}  // namespace programs::row_sum
