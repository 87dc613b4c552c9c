#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::two_outputs {

// %y: bf16[part(M, x), N] = add(%x, %b)
__global__ void add_y(const hw::bf16* x, const hw::bf16* b, hw::bf16* y, int64_t N, int64_t M_x) {
  for (int64_t element : hw::over_grid(N * M_x)) {
    const int64_t j = element % N;
    y[element] = hw::bf16(float(x[element]) + float(b[j]));
  }
}

// %z: bf16[part(M, x)] = sum(%y, axis=(1,))
__global__ void sum_z(const hw::bf16* y, hw::bf16* z, int64_t N, int64_t M_x) {
  for (int64_t i : hw::over_blocks(M_x)) {
    float sum = 0;
    for (int64_t j : hw::over_threads(N)) {
      sum += float(y[i * N + j]);
    }
    sum = hw::reduce_block(sum, hw::Add());
    if (hw::first_thread()) {
      z[i] = hw::bf16(sum);
    }
  }
}

}  // namespace programs::two_outputs
