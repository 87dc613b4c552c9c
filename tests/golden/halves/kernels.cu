#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::halves {

// %negative_x: bf16[local(M, x), 4] = negative(%x_sliced_2)
template <class Index>
__device__ void negative_x_kernel_by(const hw::bf16* x_sliced_2, hw::bf16* negative_x, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(4 * M_x)) {
    const int64_t i = element / 4;
    const int64_t j = element % 4;
    negative_x[i * 11 + j] = hw::bf16(-float(x_sliced_2[i * 8 + j]));
  }
}

__global__ void negative_x_kernel(const hw::bf16* x_sliced_2, hw::bf16* negative_x, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(4 * M_x)) {
    negative_x_kernel_by<uint32_t>(x_sliced_2, negative_x, M_x);
  } else {
    negative_x_kernel_by<int64_t>(x_sliced_2, negative_x, M_x);
  }
}

// %dst: bf16[local(M, x), 2] = copy(%src)
template <class Index>
__device__ void copy_joined_2_by(const hw::bf16* src, hw::bf16* dst, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
    const int64_t i = element / 2;
    const int64_t j = element % 2;
    dst[i * 11 + j] = src[i * 3 + j * 2];
  }
}

__global__ void copy_joined_2(const hw::bf16* src, hw::bf16* dst, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(2 * M_x)) {
    copy_joined_2_by<uint32_t>(src, dst, M_x);
  } else {
    copy_joined_2_by<int64_t>(src, dst, M_x);
  }
}

// %relu_x: bf16[local(M, x), 2] = relu(%x_sliced_3)
template <class Index>
__device__ void relu_x_kernel_by(const hw::bf16* x_sliced_3, hw::bf16* relu_x, int64_t M_x) {
  for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
    const int64_t i = element / 2;
    const int64_t j = element % 2;
    const float x_sliced_3_ij = float(x_sliced_3[i * 8 + j]);
    relu_x[i * 3 + j] = hw::bf16(x_sliced_3_ij < 0.0f ? 0.0f : x_sliced_3_ij);
  }
}

__global__ void relu_x_kernel(const hw::bf16* x_sliced_3, hw::bf16* relu_x, int64_t M_x) {
  hw::griddep_wait();
  if (hw::fits_int32(2 * M_x)) {
    relu_x_kernel_by<uint32_t>(x_sliced_3, relu_x, M_x);
  } else {
    relu_x_kernel_by<int64_t>(x_sliced_3, relu_x, M_x);
  }
}

// %dst: bf16[local(M, x), 1] = fill(value=1.0)
__global__ void fill_relu_x_padded_before(hw::bf16* dst, int64_t M_x) {
  hw::griddep_wait();
  for (int64_t i : hw::over_grid(M_x)) {
    dst[i * 3] = hw::bf16(1.0f);
  }
}

}  // namespace programs::halves
