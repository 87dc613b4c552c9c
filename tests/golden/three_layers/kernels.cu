#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_layers {

// %maximum: bf16[M, part(F, x)] = maximum(%product, -1.0)
// %h: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
__global__ void maximum_minimum_h(const hw::bf16* product, hw::bf16* h, int64_t M, int64_t F_x) {
  for (int64_t i : hw::over_grid(M * F_x)) {
    const float product_i = float(product[i]);
    const float maximum = (product_i > (-1.0f) || product_i != product_i) ? product_i : (-1.0f);
    h[i] = hw::bf16((maximum < 1.0f || maximum != maximum) ? maximum : 1.0f);
  }
}

// %scattered: bf16[M/4, E] = sum(%landing, axis=(0,))
// %add: bf16[M/4, E] = add(%x, %scattered)
// %maximum_2: bf16[M/4, E] = maximum(%add, -1.0)
// %y: bf16[M/4, E] = minimum(%maximum_2, 1.0)
__global__ void fused_y(const hw::bf16* landing, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t E) {
  for (int64_t j : hw::over_grid(M / 4 * E)) {
    float scattered = 0;
    for (int64_t i = 0; i < 4; ++i) {
      scattered += float(landing[i * (M / 4 * E) + j]);
    }
    const float add = float(x[j]) + scattered;
    const float maximum_2 = (add > (-1.0f) || add != add) ? add : (-1.0f);
    y[j] = hw::bf16((maximum_2 < 1.0f || maximum_2 != maximum_2) ? maximum_2 : 1.0f);
  }
}

}  // namespace programs::three_layers
