#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::row_sum {

// %y: bf16[M/3] = sum(%x, axis=(1,))
__global__ void __launch_bounds__(hw::kRowThreads) sum_y(const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  HW_TOUCHES(hw::reads(x, M / 3 * N), hw::writes(y, M / 3));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_blocks(M / 3)) {
      hw::Sum<float> sum = {};
      for (int64_t j : hw::over_threads<kWidth>(N)) {
        const auto x_ij = hw::load<kWidth>(x + i * N + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sum += x_ij.f32(e);
        }
      }
      sum = hw::reduce_block(sum, hw::Add());
      if (hw::first_thread()) {
        y[i] = hw::bf16(sum);
      }
    }
  };
  if (N % 8 == 0 && hw::aligned(x)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::row_sum
