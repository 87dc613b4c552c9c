#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::ag_matmul_beside_sums {

// %s_partial: bf16[K] = sum(%x, axis=(0,))
// Also for kernel @sum_t_partial of program.hw.
__global__ void __launch_bounds__(512) sum_s_partial(const hw::bf16* x, hw::bf16* s_partial, int64_t M, int64_t K) {
  HW_TOUCHES(hw::reads(x, M / 4 * K), hw::writes(s_partial, K));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (const hw::Column j : hw::over_columns<kWidth>(K)) {
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
#pragma unroll 8
      for (int64_t i : hw::over_rows<512, kWidth>(M / 4)) {
        const auto x_ij = hw::load<kWidth>(x + i * K + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sum[e] += x_ij.f32(e);
        }
      }
      sum = hw::reduce_rows_to_first<512>(sum, hw::Add());
      if (j.stores()) {
        hw::Values<hw::bf16, kWidth> s_partial_j;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          s_partial_j[e] = hw::bf16(sum[e]);
        }
        hw::store(s_partial + j, s_partial_j);
      }
    }
  };
  if (K % 8 == 0 && hw::aligned(x, s_partial)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::ag_matmul_beside_sums
