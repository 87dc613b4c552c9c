#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::gradients {

// %db_partial: bf16[N] = sum(%dy, axis=(0,))
__global__ void __launch_bounds__(512) sum_db_partial(const hw::bf16* dy, hw::bf16* db_partial, int64_t N, int64_t T_x) {
  HW_TOUCHES(hw::reads(dy, N * T_x), hw::writes(db_partial, N));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (const hw::Column j : hw::over_columns<kWidth>(N)) {
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
#pragma unroll 8
      for (int64_t i : hw::over_rows<512, kWidth>(T_x)) {
        const auto dy_ij = hw::load<kWidth>(dy + i * N + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          sum[e] += dy_ij.f32(e);
        }
      }
      sum = hw::reduce_rows_to_first<512>(sum, hw::Add());
      if (j.stores()) {
        hw::Values<hw::bf16, kWidth> db_partial_j;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          db_partial_j[e] = hw::bf16(sum[e]);
        }
        hw::store(db_partial + j, db_partial_j);
      }
    }
  };
  if (N % 8 == 0 && hw::aligned(dy, db_partial)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::gradients
