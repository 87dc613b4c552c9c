#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::ag_matmul_pull {

// %h: bf16[M/4, K] = relu(%x)
__global__ void relu_h(const hw::bf16* x, hw::bf16* h, int64_t elements) {
  HW_TOUCHES(hw::reads(x, elements), hw::writes(h, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto x_i = hw::load<kWidth>(x + i);
      hw::Values<hw::bf16, kWidth> h_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float x_e = x_i.f32(e);
        h_i[e] = hw::bf16(x_e < 0.0f ? 0.0f : x_e);
      }
      hw::store(h + i, h_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(x, h)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::ag_matmul_pull
