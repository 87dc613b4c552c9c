#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::halves {

// %negative_x: bf16[local(M, x), 4] = negative(%x_sliced_2)
__global__ void negative_x_kernel(const hw::bf16* x_sliced_2, hw::bf16* negative_x, int64_t M_x) {
  HW_TOUCHES(hw::reads(x_sliced_2, {M_x, 4}, {8, 1}), hw::writes(negative_x, {M_x, 4}, {11, 1}));
  hw::griddep_wait();
  const auto compute = [&]<class Index>(Index) {
    for (Index element : hw::over_grid<1, Index>(4 * M_x)) {
      const int64_t i = element / 4;
      const int64_t j = element % 4;
      negative_x[i * 11 + j] = hw::bf16(-float(x_sliced_2[i * 8 + j]));
    }
  };
  if (hw::fits_int32(4 * M_x)) {
    compute(uint32_t());
  } else {
    compute(int64_t());
  }
}

// %dst: bf16[local(M, x), 2] = copy(%src)
__global__ void copy_joined_2(const hw::bf16* src, hw::bf16* dst, int64_t M_x) {
  HW_TOUCHES(hw::reads(src, {M_x, 2}, {3, 2}), hw::writes(dst, {M_x, 2}, {11, 1}));
  hw::griddep_wait();
  const auto compute = [&]<class Index>(Index) {
    for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
      const int64_t i = element / 2;
      const int64_t j = element % 2;
      dst[i * 11 + j] = src[i * 3 + j * 2];
    }
  };
  if (hw::fits_int32(2 * M_x)) {
    compute(uint32_t());
  } else {
    compute(int64_t());
  }
}

// %relu_x: bf16[local(M, x), 2] = relu(%x_sliced_3)
__global__ void relu_x_kernel(const hw::bf16* x_sliced_3, hw::bf16* relu_x, int64_t M_x) {
  HW_TOUCHES(hw::reads(x_sliced_3, {M_x, 2}, {8, 1}), hw::writes(relu_x, {M_x, 2}, {3, 1}));
  hw::griddep_wait();
  const auto compute = [&]<class Index>(Index) {
    for (Index element : hw::over_grid<1, Index>(2 * M_x)) {
      const int64_t i = element / 2;
      const int64_t j = element % 2;
      const float x_sliced_3_ij = float(x_sliced_3[i * 8 + j]);
      relu_x[i * 3 + j] = hw::bf16(x_sliced_3_ij < 0.0f ? 0.0f : x_sliced_3_ij);
    }
  };
  if (hw::fits_int32(2 * M_x)) {
    compute(uint32_t());
  } else {
    compute(int64_t());
  }
}

// %dst: bf16[local(M, x), 1] = fill(value=1.0)
__global__ void fill_relu_x_padded_before(hw::bf16* dst, int64_t M_x) {
  HW_TOUCHES(hw::writes(dst, {M_x}, {3}));
  hw::griddep_wait();
  for (int64_t i : hw::over_grid(M_x)) {
    dst[i * 3] = hw::bf16(1.0f);
  }
}

}  // namespace programs::halves
