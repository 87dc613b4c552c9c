#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::allreduce_rows {

// %y_partial: bf16[N/3] = sum(%x, axis=(0,))
__global__ void __launch_bounds__(512) sum_y_partial(const hw::bf16* x, hw::bf16* y_partial, int64_t N, int64_t R_x) {
  HW_TOUCHES(hw::reads(x, {R_x, N / 3}, {N, 1}), hw::writes(y_partial, N / 3));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (const hw::Column j : hw::over_columns<kWidth>(N / 3)) {
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
#pragma unroll 8
      for (int64_t i : hw::over_rows<512, kWidth>(R_x)) {
        const auto x_ij = hw::load<kWidth>(x + i * N + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sum[e] += x_ij.f32(e);
        }
      }
      sum = hw::reduce_rows_to_first<512>(sum, hw::Add());
      if (j.stores()) {
        hw::Values<hw::bf16, kWidth> y_partial_j;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          y_partial_j[e] = hw::bf16(sum[e]);
        }
        hw::store(y_partial + j, y_partial_j);
      }
    }
  };
  if (N / 3 % 8 == 0 && N % 8 == 0 && hw::aligned(x, y_partial)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::allreduce_rows
