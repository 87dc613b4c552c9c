#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::halves {

// %negative: bf16[part(M, x), 4] = negative(%sliced_2)
template <class Index>
__device__ void negative_negative_by(const hw::bf16* sliced_2, hw::bf16* negative, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(4 * M_x)) {
    const int64_t i = element / 4;
    const int64_t j = element % 4;
    negative[i * 11 + j] = hw::bf16(-float(sliced_2[i * 8 + j]));
  }
}

__global__ void negative_negative(const hw::bf16* sliced_2, hw::bf16* negative, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(4 * M_x)) {
    negative_negative_by<uint32_t>(sliced_2, negative, M_x);
  } else {
    negative_negative_by<int64_t>(sliced_2, negative, M_x);
  }
}

// %dst: bf16[part(M, x), 2] = copy(%src)
template <class Index>
__device__ void copy_y0_2_by(const hw::bf16* src, hw::bf16* dst, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
    const int64_t i = element / 2;
    const int64_t j = element % 2;
    dst[i * 11 + j] = src[i * 3 + j * 2];
  }
}

__global__ void copy_y0_2(const hw::bf16* src, hw::bf16* dst, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(2 * M_x)) {
    copy_y0_2_by<uint32_t>(src, dst, M_x);
  } else {
    copy_y0_2_by<int64_t>(src, dst, M_x);
  }
}

// %relu: bf16[part(M, x), 2] = relu(%sliced_5)
template <class Index>
__device__ void relu_relu_by(const hw::bf16* sliced_5, hw::bf16* relu, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
    const int64_t i = element / 2;
    const int64_t j = element % 2;
    const float sliced_5_ij = float(sliced_5[i * 8 + j]);
    relu[i * 3 + j] = hw::bf16(sliced_5_ij < 0.0f ? 0.0f : sliced_5_ij);
  }
}

__global__ void relu_relu(const hw::bf16* sliced_5, hw::bf16* relu, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(2 * M_x)) {
    relu_relu_by<uint32_t>(sliced_5, relu, M_x);
  } else {
    relu_relu_by<int64_t>(sliced_5, relu, M_x);
  }
}

// %dst: bf16[part(M, x), 1] = fill(value=1.0)
__global__ void fill_y1_before(hw::bf16* dst, int64_t M_x) {
  hw::griddep_wait();
  for (int64_t i : hw::over_grid(M_x)) {
    dst[i * 3] = hw::bf16(1.0f);
  }
}

}  // namespace programs::halves
