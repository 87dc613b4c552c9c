#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::add {

// %y: bf16[M/3, N] = add(%a, %b)
__global__ void add_y(const hw::bf16* a, const hw::bf16* b, hw::bf16* y, int64_t elements) {
  HW_TOUCHES(hw::reads(a, elements), hw::reads(b, elements), hw::writes(y, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto a_i = hw::load<kWidth>(a + i);
      const auto b_i = hw::load<kWidth>(b + i);
      hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_i[e] = hw::bf16(a_i.f32(e) + b_i.f32(e));
      }
      hw::store(y + i, y_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(a, b, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::add
