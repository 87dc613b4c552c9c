#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::halves {

// %negative_x: bf16[local(M, x), 4] = negative(%x_sliced)
// %joined: bf16[local(M, x), 11] = concat(%x_from_4, %negative_x, %h_sliced, %h_from_1, axis=1)
__global__ void negative_concat_joined(const hw::bf16* x_sliced, const hw::bf16* x_from_4, const hw::bf16* h_sliced,
                                       const hw::bf16* h_from_1, hw::bf16* joined, int64_t M_x) {
  HW_TOUCHES(hw::reads(x_sliced, {M_x, 4}, {8, 1}), hw::reads(x_from_4, {M_x, 4}, {8, 1}), hw::reads(h_sliced, {M_x, 2}, {3, 2}),
             hw::reads(h_from_1, {M_x}, {3}), hw::writes(joined, 11 * M_x));
  hw::griddep_wait();
  const auto compute = [&]<class Index>(Index) {
    for (Index element : hw::over_grid<1, Index>(11 * M_x)) {
      const int64_t i = element / 11;
      const int64_t j = element % 11;
      float joined_element;
      if (j < 4) {
        joined_element = float(x_from_4[i * 8 + j]);
      } else if (j < 8) {
        joined_element = -float(x_sliced[i * 8 + (j - 4)]);
      } else if (j < 10) {
        joined_element = float(h_sliced[i * 3 + (j - 8) * 2]);
      } else {
        joined_element = float(h_from_1[i * 3]);
      }
      joined[element] = hw::bf16(joined_element);
    }
  };
  if (hw::fits_int32(11 * M_x)) {
    compute(uint32_t());
  } else {
    compute(int64_t());
  }
}

// %relu_x: bf16[local(M, x), 2] = relu(%x_from_1)
// %relu_x_padded: bf16[local(M, x), 3] = pad(%relu_x, low=(0, 1), high=(0, 0), value=1.0)
__global__ void relu_pad_relu_x_padded(const hw::bf16* x_from_1, hw::bf16* relu_x_padded, int64_t M_x) {
  HW_TOUCHES(hw::reads(x_from_1, {M_x, 2}, {8, 1}), hw::writes(relu_x_padded, 3 * M_x));
  hw::griddep_wait();
  const auto compute = [&]<class Index>(Index) {
    for (Index element : hw::over_grid<1, Index>(3 * M_x)) {
      const int64_t i = element / 3;
      const int64_t j = element % 3;
      float relu_x_padded_element;
      if (j >= 1 && j < 3) {
        const float x_from_1_ij = float(x_from_1[i * 8 + (j - 1)]);
        relu_x_padded_element = x_from_1_ij < 0.0f ? 0.0f : x_from_1_ij;
      } else {
        relu_x_padded_element = 1.0f;
      }
      relu_x_padded[element] = hw::bf16(relu_x_padded_element);
    }
  };
  if (hw::fits_int32(3 * M_x)) {
    compute(uint32_t());
  } else {
    compute(int64_t());
  }
}

}  // namespace programs::halves
