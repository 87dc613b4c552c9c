#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::trained_in_zigzag {

// %k_in_order_pieces: bf16[2, 2, 4, S/8, 64] = reverse_second(%k_in_order_halves, axis=2, halves=1)
__global__ void reverse_second_k_in_order_pieces(const hw::bf16* k_in_order_halves, hw::bf16* k_in_order_pieces, int64_t S) {
  HW_TOUCHES(hw::reads(k_in_order_halves, {4, 4, 8 * S}, {8 * S, 32 * S, 1}), hw::writes(k_in_order_pieces, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t i = element / Index(64 * S);
      const int64_t j = element / Index(32 * S) % 2;
      const int64_t l = element / Index(8 * S) % 4;
      const int64_t k = element % Index(8 * S);
      const int64_t k_in_order_pieces_from = j == 1 ? 3 - l : l;
      const auto k_in_order_pieces_elements =
          hw::load<kWidth>(k_in_order_halves + i * 16 * S + j * 8 * S + k_in_order_pieces_from * 32 * S + k);
      hw::store(k_in_order_pieces + element, k_in_order_pieces_elements);
    }
  };
  if (!hw::aligned(k_in_order_halves, k_in_order_pieces)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %dk_before_add: bf16[2, S/2, 64] = add(%dk_before_first_half, %dk_before_first_partial)
// %dk_before: bf16[2, S, 64] = concat(%dk_before_add, %dk_before_second_half, axis=1)
__global__ void add_concat_dk_before(const hw::bf16* dk_before_first_half, const hw::bf16* dk_before_first_partial,
                                     const hw::bf16* dk_before_second_half, hw::bf16* dk_before, int64_t S) {
  HW_TOUCHES(hw::reads(dk_before_first_half, {2, 32 * S}, {64 * S, 1}), hw::reads(dk_before_first_partial, 64 * S),
             hw::reads(dk_before_second_half, {2, 32 * S}, {64 * S, 1}), hw::writes(dk_before, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t i = element / Index(64 * S);
      const int64_t j = element / 64 % Index(S);
      const int64_t k = element % 64;
      hw::Values<float, kWidth> dk_before_values;
      if (j < S / 2) {
        const auto dk_before_first_half_element = hw::load<kWidth>(dk_before_first_half + element);
        const auto dk_before_first_partial_ijk = hw::load<kWidth>(dk_before_first_partial + i * 32 * S + j * 64 + k);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          dk_before_values[e] = dk_before_first_half_element.f32(e) + dk_before_first_partial_ijk.f32(e);
        }
      } else {
        const auto dk_before_second_half_element = hw::load<kWidth>(dk_before_second_half + (element - 32 * S));
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          dk_before_values[e] = dk_before_second_half_element.f32(e);
        }
      }
      hw::Values<hw::bf16, kWidth> dk_before_element;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        dk_before_element[e] = hw::bf16(dk_before_values[e]);
      }
      hw::store(dk_before + element, dk_before_element);
    }
  };
  if (!hw::aligned(dk_before_first_half, dk_before_first_partial, dk_before_second_half, dk_before)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %dk_pieces: bf16[4, 2, 2, S/8, 64] = reverse_second(%dk_halves, axis=0, halves=2)
__global__ void reverse_second_dk_pieces(const hw::bf16* dk_halves, hw::bf16* dk_pieces, int64_t S) {
  HW_TOUCHES(hw::reads(dk_halves, {4, 4, 8 * S}, {8 * S, 32 * S, 1}), hw::writes(dk_pieces, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t l = element / Index(32 * S);
      const int64_t i = element / Index(16 * S) % 2;
      const int64_t j = element / Index(8 * S) % 2;
      const int64_t k = element % Index(8 * S);
      const int64_t dk_pieces_from = j == 1 ? 3 - l : l;
      const auto dk_pieces_elements = hw::load<kWidth>(dk_halves + i * 64 * S + j * 32 * S + dk_pieces_from * 8 * S + k);
      hw::store(dk_pieces + element, dk_pieces_elements);
    }
  };
  if (!hw::aligned(dk_halves, dk_pieces)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

}  // namespace programs::trained_in_zigzag
