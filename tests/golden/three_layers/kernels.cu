#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_layers {

// %maximum: bf16[M, part(F, x)] = maximum(%product, -1.0)
// %h: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
template <int kWidth>
__device__ void maximum_minimum_h_by(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t F_x) {
  for (int64_t i : hw::over_grid<kWidth>(M * F_x)) {
    const auto product_i = hw::load<kWidth>(product + i);
    hw::Values<hw::bf16, kWidth> h_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float product_e = float(product_i[e]);
      const float maximum = (product_e > (-1.0f) || product_e != product_e) ? product_e : (-1.0f);
      h_i[e] = hw::bf16((maximum < 1.0f || maximum != maximum) ? maximum : 1.0f);
    }
    hw::store(h + i, h_i);
  }
}

__global__ void maximum_minimum_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t F_x) {
  hw::griddep_wait();
  if (M * F_x % 8 == 0 && hw::aligned(product, h)) {
    maximum_minimum_h_by<8>(product, h, M, F_x);
  } else {
    maximum_minimum_h_by<1>(product, h, M, F_x);
  }
}

// %scattered: bf16[M/4, E] = sum(%landing, axis=(0,))
// %add: bf16[M/4, E] = add(%x, %scattered)
// %maximum_2: bf16[M/4, E] = maximum(%add, -1.0)
// %y: bf16[M/4, E] = minimum(%maximum_2, 1.0)
template <int kWidth>
__device__ void fused_y_by(const hw::bf16* landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E) {
  for (int64_t j : hw::over_grid<kWidth>(M / 4 * E)) {
    auto scattered = hw::filled<kWidth, hw::Sum<float>>({});
    for (int64_t i = 0; i < 4; ++i) {
      const auto landing_ij = hw::load<kWidth>(landing + i * (M / 4 * E) + j);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        scattered[e] += float(landing_ij[e]);
      }
    }
    const auto x_j = hw::load<kWidth>(x + j);
    hw::Values<hw::bf16, kWidth> y_j;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float add = float(x_j[e]) + scattered[e];
      const float maximum_2 = (add > (-1.0f) || add != add) ? add : (-1.0f);
      y_j[e] = hw::bf16((maximum_2 < 1.0f || maximum_2 != maximum_2) ? maximum_2 : 1.0f);
    }
    hw::store(y + j, y_j);
  }
}

__global__ void fused_y(const hw::bf16* landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E) {
  hw::griddep_wait();
  if (M / 4 * E % 8 == 0 && hw::aligned(landing, x, y)) {
    fused_y_by<8>(landing, x, y, M, E);
  } else {
    fused_y_by<1>(landing, x, y, M, E);
  }
}

}  // namespace programs::three_layers
