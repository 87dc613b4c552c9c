#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::epilogues {

// %maximum_s: bf16[M/4, N] = maximum(%s, -1.0)
// %c: bf16[M/4, N] = minimum(%maximum_s, 1.0)
__global__ void maximum_minimum_c(const hw::bf16* s, hw::bf16* c, int64_t elements) {
  HW_TOUCHES(hw::reads(s, elements), hw::writes(c, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto s_i = hw::load<kWidth>(s + i);
      hw::Values<hw::bf16, kWidth> c_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float s_e = s_i.f32(e);
        const float maximum_s = (s_e > -1.0f || s_e != s_e) ? s_e : -1.0f;
        c_i[e] = hw::bf16((maximum_s < 1.0f || maximum_s != maximum_s) ? maximum_s : 1.0f);
      }
      hw::store(c + i, c_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(s, c)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::epilogues
