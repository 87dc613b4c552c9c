#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::matmul_rs_put {

// %term_0: f32[M/4, N] = astype(%matmul_w_own)
// %term_1: f32[M/4, N] = astype(%y_landing_0)
// %term_2: f32[M/4, N] = add(%term_0, %term_1)
// %term_3: f32[M/4, N] = astype(%y_landing_1)
// %term_4: f32[M/4, N] = add(%term_2, %term_3)
// %term_5: f32[M/4, N] = astype(%y_landing_2)
// %term_6: f32[M/4, N] = add(%term_4, %term_5)
// %y: bf16[M/4, N] = astype(%term_6)
__global__ void fused_y(const hw::bf16* matmul_w_own, const hw::bf16* y_landing_0, const hw::bf16* y_landing_1,
                        const hw::bf16* y_landing_2, hw::bf16* y, int64_t elements) {
  HW_TOUCHES(hw::reads(matmul_w_own, elements), hw::reads(y_landing_0, elements), hw::reads(y_landing_1, elements),
             hw::reads(y_landing_2, elements), hw::writes(y, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto matmul_w_own_i = hw::load<kWidth>(matmul_w_own + i);
      const auto y_landing_0_i = hw::load<kWidth>(y_landing_0 + i);
      const auto y_landing_1_i = hw::load<kWidth>(y_landing_1 + i);
      const auto y_landing_2_i = hw::load<kWidth>(y_landing_2 + i);
      hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float term_2 = matmul_w_own_i.f32(e) + y_landing_0_i.f32(e);
        const float term_4 = term_2 + y_landing_1_i.f32(e);
        const float term_6 = term_4 + y_landing_2_i.f32(e);
        y_i[e] = hw::bf16(term_6);
      }
      hw::store(y + i, y_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(matmul_w_own, y_landing_0, y_landing_1, y_landing_2, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::matmul_rs_put
