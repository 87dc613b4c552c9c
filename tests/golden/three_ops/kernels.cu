#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_ops {

// %a: bf16[M/3, N] = negative(%x)
__global__ void negative_a(const hw::bf16* x, hw::bf16* a, int64_t elements) {
  HW_TOUCHES(hw::reads(x, elements), hw::writes(a, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto x_i = hw::load<kWidth>(x + i);
      hw::Values<hw::bf16, kWidth> a_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        a_i[e] = hw::bf16(-x_i.f32(e));
      }
      hw::store(a + i, a_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(x, a)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

// %b: bf16[M, N] = multiply(%a, %x)
__global__ void multiply_b(const hw::bf16* a, const hw::bf16* x, hw::bf16* b, int64_t elements) {
  HW_TOUCHES(hw::reads(a, elements), hw::reads(x, elements), hw::writes(b, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto a_i = hw::load<kWidth>(a + i);
      const auto x_i = hw::load<kWidth>(x + i);
      hw::Values<hw::bf16, kWidth> b_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        b_i[e] = hw::bf16(a_i.f32(e) * x_i.f32(e));
      }
      hw::store(b + i, b_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(a, x, b)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y: bf16[M/3, N] = add(%b, %x)
__global__ void add_y(const hw::bf16* b, const hw::bf16* x, hw::bf16* y, int64_t elements) {
  HW_TOUCHES(hw::reads(b, elements), hw::reads(x, elements), hw::writes(y, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto b_i = hw::load<kWidth>(b + i);
      const auto x_i = hw::load<kWidth>(x + i);
      hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_i[e] = hw::bf16(b_i.f32(e) + x_i.f32(e));
      }
      hw::store(y + i, y_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(b, x, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::three_ops
