#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_ops {

// %h: bf16[M/3, N] = negative(%x)
// %y: bf16[M/3, N] = multiply(%h, %x)
__global__ void negative_multiply_y(const hw::bf16* x, hw::bf16* y, int64_t elements) {
  HW_TOUCHES(hw::reads(x, elements), hw::writes(y, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto x_i = hw::load<kWidth>(x + i);
      hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float x_e = x_i.f32(e);
        const float h = -x_e;
        y_i[e] = hw::bf16(h * x_e);
      }
      hw::store(y + i, y_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(x, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::two_ops
