#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::trained_in_zigzag {

// %in_order_pieces: bf16[2, 2, 4, S/8, 64] = reverse_second(%in_order_halves, axis=2, halves=1)
__global__ void reverse_second_in_order_pieces(const hw::bf16* in_order_halves, hw::bf16* in_order_pieces, int64_t S) {
  HW_TOUCHES(hw::reads(in_order_halves, {4, 4, 8 * S}, {8 * S, 32 * S, 1}), hw::writes(in_order_pieces, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t i = element / Index(64 * S);
      const int64_t j = element / Index(32 * S) % 2;
      const int64_t l = element / Index(8 * S) % 4;
      const int64_t k = element % Index(8 * S);
      const int64_t in_order_pieces_from = j == 1 ? 3 - l : l;
      const auto in_order_pieces_elements =
          hw::load<kWidth>(in_order_halves + i * 16 * S + j * 8 * S + in_order_pieces_from * 32 * S + k);
      hw::store(in_order_pieces + element, in_order_pieces_elements);
    }
  };
  if (!hw::aligned(in_order_halves, in_order_pieces)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %local_add: bf16[2, S/2, 64] = add(%local_second_lower_half, %local_first)
// %local: bf16[2, S, 64] = concat(%local_add, %local_second_upper_half, axis=1)
__global__ void add_concat_local(const hw::bf16* local_second_lower_half, const hw::bf16* local_first,
                                 const hw::bf16* local_second_upper_half, hw::bf16* local, int64_t S) {
  HW_TOUCHES(hw::reads(local_second_lower_half, {2, 32 * S}, {64 * S, 1}), hw::reads(local_first, 64 * S),
             hw::reads(local_second_upper_half, {2, 32 * S}, {64 * S, 1}), hw::writes(local, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t i = element / Index(64 * S);
      const int64_t j = element / 64 % Index(S);
      const int64_t k = element % 64;
      hw::Values<float, kWidth> local_values;
      if (j < S / 2) {
        const auto local_second_lower_half_element = hw::load<kWidth>(local_second_lower_half + element);
        const auto local_first_ijk = hw::load<kWidth>(local_first + i * 32 * S + j * 64 + k);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          local_values[e] = local_second_lower_half_element.f32(e) + local_first_ijk.f32(e);
        }
      } else {
        const auto local_second_upper_half_element = hw::load<kWidth>(local_second_upper_half + (element - 32 * S));
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          local_values[e] = local_second_upper_half_element.f32(e);
        }
      }
      hw::Values<hw::bf16, kWidth> local_element;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        local_element[e] = hw::bf16(local_values[e]);
      }
      hw::store(local + element, local_element);
    }
  };
  if (!hw::aligned(local_second_lower_half, local_first, local_second_upper_half, local)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %pieces: bf16[4, 2, 2, S/8, 64] = reverse_second(%halves, axis=0, halves=2)
__global__ void reverse_second_pieces(const hw::bf16* halves, hw::bf16* pieces, int64_t S) {
  HW_TOUCHES(hw::reads(halves, {4, 4, 8 * S}, {8 * S, 32 * S, 1}), hw::writes(pieces, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t l = element / Index(32 * S);
      const int64_t i = element / Index(16 * S) % 2;
      const int64_t j = element / Index(8 * S) % 2;
      const int64_t k = element % Index(8 * S);
      const int64_t pieces_from = j == 1 ? 3 - l : l;
      const auto pieces_elements = hw::load<kWidth>(halves + i * 64 * S + j * 32 * S + pieces_from * 8 * S + k);
      hw::store(pieces + element, pieces_elements);
    }
  };
  if (!hw::aligned(halves, pieces)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

}  // namespace programs::trained_in_zigzag
