#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_layers {

// %maximum_w_in: bf16[M, local(F, x)] = maximum(%matmul_w_in, -1.0)
// %h: bf16[M, local(F, x)] = minimum(%maximum_w_in, 1.0)
__global__ void maximum_minimum_h(const hw::bf16* matmul_w_in, hw::bf16* h, int64_t elements) {
  HW_TOUCHES(hw::reads(matmul_w_in, elements), hw::writes(h, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      const auto matmul_w_in_i = hw::load<kWidth>(matmul_w_in + i);
      hw::Values<hw::bf16, kWidth> h_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float matmul_w_in_e = matmul_w_in_i.f32(e);
        const float maximum_w_in = (matmul_w_in_e > -1.0f || matmul_w_in_e != matmul_w_in_e) ? matmul_w_in_e : -1.0f;
        h_i[e] = hw::bf16((maximum_w_in < 1.0f || maximum_w_in != maximum_w_in) ? maximum_w_in : 1.0f);
      }
      hw::store(h + i, h_i);
    }
  };
  if (elements % 8 == 0 && hw::aligned(matmul_w_in, h)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

// %scattered: bf16[M/4, E] = sum(%scattered_landing, axis=(0,))
// %add_x: bf16[M/4, E] = add(%x, %scattered)
// %maximum_x: bf16[M/4, E] = maximum(%add_x, -1.0)
// %y: bf16[M/4, E] = minimum(%maximum_x, 1.0)
__global__ void fused_y(const hw::bf16* scattered_landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E) {
  HW_TOUCHES(hw::reads(scattered_landing, M * E), hw::reads(x, M / 4 * E), hw::writes(y, M / 4 * E));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t j : hw::over_grid<kWidth>(M / 4 * E)) {
      auto scattered = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t i = 0; i < 4; ++i) {
        const auto scattered_landing_ij = hw::load<kWidth>(scattered_landing + i * (M / 4 * E) + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          scattered[e] += scattered_landing_ij.f32(e);
        }
      }
      const auto x_j = hw::load<kWidth>(x + j);
      hw::Values<hw::bf16, kWidth> y_j;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float add_x = x_j.f32(e) + scattered[e];
        const float maximum_x = (add_x > -1.0f || add_x != add_x) ? add_x : -1.0f;
        y_j[e] = hw::bf16((maximum_x < 1.0f || maximum_x != maximum_x) ? maximum_x : 1.0f);
      }
      hw::store(y + j, y_j);
    }
  };
  if (M / 4 * E % 8 == 0 && hw::aligned(scattered_landing, x, y)) {
    compute(hw::Width<8>());
  } else {
    compute(hw::Width<1>());
  }
}

}  // namespace programs::three_layers
