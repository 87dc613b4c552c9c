#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::add {

// %y: bf16[M/3, N] = add(%a, %b)
__global__ void add_y(const hw::bf16* a, const hw::bf16* b, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid(M / 3 * N)) {
    y[i] = hw::bf16(float(a[i]) + float(b[i]));
  }
}

}  // namespace programs::add
