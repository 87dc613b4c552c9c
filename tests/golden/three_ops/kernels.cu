#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_ops {

// %a: bf16[M/3, N] = neg(%x)
__global__ void neg_a(const hw::bf16* x, hw::bf16* a, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid(M / 3 * N)) {
    a[i] = hw::bf16(-float(x[i]));
  }
}

// %b: bf16[M, N] = mul(%a, %x)
__global__ void mul_b(const hw::bf16* a, const hw::bf16* x, hw::bf16* b, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid(M * N)) {
    b[i] = hw::bf16(float(a[i]) * float(x[i]));
  }
}

// %y: bf16[M/3, N] = add(%b, %x)
__global__ void add_y(const hw::bf16* b, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid(M / 3 * N)) {
    y[i] = hw::bf16(float(b[i]) + float(x[i]));
  }
}

}  // namespace programs::three_ops
