#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_outputs {

// %y: bf16[local(M, x), N] = add(%x, %b)
// %z: bf16[local(M, x)] = sum(%y, axis=(1,))
__global__ void __launch_bounds__(hw::kRowThreads)
    add_sum_y_z(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x) {
  HW_TOUCHES(hw::reads(x, N * M_x), hw::reads(b, N), hw::writes(y, N * M_x), hw::writes(z, M_x));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_blocks(M_x)) {
      hw::Sum<float> sum = {};
      for (int64_t j : hw::over_threads<kWidth>(N)) {
        const auto x_ij = hw::load<kWidth>(x + i * N + j);
        const auto b_j = hw::load<kWidth>(b + j);
        hw::Values<hw::bf16, kWidth> y_ij;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_e = x_ij.f32(e) + b_j.f32(e);
          sum += y_e;
          y_ij[e] = hw::bf16(y_e);
        }
        hw::store(y + i * N + j, y_ij);
      }
      sum = hw::reduce_block(sum, hw::Add());
      if (hw::first_thread()) {
        z[i] = hw::bf16(sum);
      }
    }
  };
  if (N % 8 == 0 && hw::aligned(x, b, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::two_outputs
