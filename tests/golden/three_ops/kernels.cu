#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::three_ops {

// %a: bf16[M/3, N] = negative(%x)
template <int kWidth>
__device__ void negative_a_by(const hw::bf16* x, hw::bf16* a, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid<kWidth>(M / 3 * N)) {
    const auto x_i = hw::load<kWidth>(x + i);
    hw::Values<hw::bf16, kWidth> a_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      a_i[e] = hw::bf16(-float(x_i[e]));
    }
    hw::store(a + i, a_i);
  }
}

__global__ void negative_a(const hw::bf16* x, hw::bf16* a, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M / 3 * N % 8 == 0 && hw::aligned(x, a)) {
    negative_a_by<8>(x, a, M, N);
  } else {
    negative_a_by<1>(x, a, M, N);
  }
}

// %b: bf16[M, N] = multiply(%a, %x)
template <int kWidth>
__device__ void multiply_b_by(const hw::bf16* a, const hw::bf16* x, hw::bf16* b, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid<kWidth>(M * N)) {
    const auto a_i = hw::load<kWidth>(a + i);
    const auto x_i = hw::load<kWidth>(x + i);
    hw::Values<hw::bf16, kWidth> b_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      b_i[e] = hw::bf16(float(a_i[e]) * float(x_i[e]));
    }
    hw::store(b + i, b_i);
  }
}

__global__ void multiply_b(const hw::bf16* a, const hw::bf16* x, hw::bf16* b, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M * N % 8 == 0 && hw::aligned(a, x, b)) {
    multiply_b_by<8>(a, x, b, M, N);
  } else {
    multiply_b_by<1>(a, x, b, M, N);
  }
}

// %y: bf16[M/3, N] = add(%b, %x)
template <int kWidth>
__device__ void add_y_by(const hw::bf16* b, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  for (int64_t i : hw::over_grid<kWidth>(M / 3 * N)) {
    const auto b_i = hw::load<kWidth>(b + i);
    const auto x_i = hw::load<kWidth>(x + i);
    hw::Values<hw::bf16, kWidth> y_i;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      y_i[e] = hw::bf16(float(b_i[e]) + float(x_i[e]));
    }
    hw::store(y + i, y_i);
  }
}

__global__ void add_y(const hw::bf16* b, const hw::bf16* x, hw::bf16* y, int64_t M, int64_t N) {
  hw::griddep_wait();
  if (M / 3 * N % 8 == 0 && hw::aligned(b, x, y)) {
    add_y_by<8>(b, x, y, M, N);
  } else {
    add_y_by<1>(b, x, y, M, N);
  }
}

}  // namespace programs::three_ops
