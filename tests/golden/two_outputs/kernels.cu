#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_outputs {

// %y: bf16[local(M, x), N] = add(%x, %b)
// %z: bf16[local(M, x)] = sum(%y, axis=(1,))
template <int kWidth>
__device__ void add_sum_y_z_by(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x) {
  for (int64_t i : hw::over_blocks(M_x)) {
    hw::Sum<float> sum = {};
    for (int64_t j : hw::over_threads<kWidth>(N)) {
      const auto x_ij = hw::load<kWidth>(x + i * N + j);
      const auto b_j = hw::load<kWidth>(b + j);
      hw::Values<hw::bf16, kWidth> y_ij;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float y_e = float(x_ij[e]) + float(b_j[e]);
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
}

__global__ void __launch_bounds__(hw::kRowThreads)
    add_sum_y_z(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x) {
  hw::griddep_wait();
  if (N % 8 == 0 && hw::aligned(x, b, y)) {
    add_sum_y_z_by<8>(x, b, y, z, N, M_x);
  } else {
    add_sum_y_z_by<1>(x, b, y, z, N, M_x);
  }
}

}  // namespace programs::two_outputs
