#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::trained_in_zigzag {

// %k_in_order_pieces: bf16[2, 2, 4, S/8, 64] = reverse_second(%k_in_order_halves, axis=2, halves=1)
template <int kWidth, class Index>
__device__ void reverse_second_k_in_order_pieces_by(const hw::bf16* k_in_order_halves, hw::bf16* k_in_order_pieces, int64_t S) {
  for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
    const int64_t i = element / Index(64 * S);
    const int64_t j = element / Index(32 * S) % 2;
    const int64_t l = element / Index(8 * S) % 4;
    const int64_t k = element % Index(8 * S);
    const int64_t k_in_order_pieces_from = j ? 3 - l : l;
    const auto k_in_order_pieces_elements =
        hw::load<kWidth>(k_in_order_halves + i * (16 * S) + j * (8 * S) + k_in_order_pieces_from * (32 * S) + k);
    hw::Values<hw::bf16, kWidth> k_in_order_pieces_element;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      k_in_order_pieces_element[e] = k_in_order_pieces_elements[e];
    }
    hw::store(k_in_order_pieces + element, k_in_order_pieces_element);
  }
}

__global__ void reverse_second_k_in_order_pieces(const hw::bf16* k_in_order_halves, hw::bf16* k_in_order_pieces, int64_t S) {
  hw::griddep_wait();
  if (hw::aligned(k_in_order_halves, k_in_order_pieces) && hw::fits_int32(128 * S)) {
    reverse_second_k_in_order_pieces_by<8, uint32_t>(k_in_order_halves, k_in_order_pieces, S);
  } else if (hw::aligned(k_in_order_halves, k_in_order_pieces)) {
    reverse_second_k_in_order_pieces_by<8, int64_t>(k_in_order_halves, k_in_order_pieces, S);
  } else {
    reverse_second_k_in_order_pieces_by<1, int64_t>(k_in_order_halves, k_in_order_pieces, S);
  }
}

// %dk_add: bf16[2, S/2, 64] = add(%dk_half, %dk_first_partial)
template <int kWidth, class Index>
__device__ void add_dk_add_by(const hw::bf16* dk_half, const hw::bf16* dk_first_partial, hw::bf16* dk_add, int64_t S) {
  for (Index element : hw::over_grid<kWidth, Index>(64 * S)) {
    const int64_t i = element / Index(32 * S);
    const int64_t j = element % Index(32 * S);
    const auto dk_half_ij = hw::load<kWidth>(dk_half + i * (64 * S) + j);
    const auto dk_first_partial_element = hw::load<kWidth>(dk_first_partial + element);
    hw::Values<hw::bf16, kWidth> dk_add_ij;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      dk_add_ij[e] = hw::bf16(float(dk_half_ij[e]) + float(dk_first_partial_element[e]));
    }
    hw::store(dk_add + i * (64 * S) + j, dk_add_ij);
  }
}

__global__ void add_dk_add(const hw::bf16* dk_half, const hw::bf16* dk_first_partial, hw::bf16* dk_add, int64_t S) {
  hw::griddep_wait();
  if (hw::aligned(dk_half, dk_first_partial, dk_add) && hw::fits_int32(64 * S)) {
    add_dk_add_by<8, uint32_t>(dk_half, dk_first_partial, dk_add, S);
  } else if (hw::aligned(dk_half, dk_first_partial, dk_add)) {
    add_dk_add_by<8, int64_t>(dk_half, dk_first_partial, dk_add, S);
  } else {
    add_dk_add_by<1, int64_t>(dk_half, dk_first_partial, dk_add, S);
  }
}

// %dk_resharded_pieces: bf16[4, 2, 2, S/8, 64] = reverse_second(%dk_resharded_halves, axis=0, halves=2)
template <int kWidth, class Index>
__device__ void reverse_second_dk_resharded_pieces_by(const hw::bf16* dk_resharded_halves, hw::bf16* dk_resharded_pieces,
                                                      int64_t S) {
  for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
    const int64_t l = element / Index(32 * S);
    const int64_t i = element / Index(16 * S) % 2;
    const int64_t j = element / Index(8 * S) % 2;
    const int64_t k = element % Index(8 * S);
    const int64_t dk_resharded_pieces_from = j ? 3 - l : l;
    const auto dk_resharded_pieces_elements =
        hw::load<kWidth>(dk_resharded_halves + i * (64 * S) + j * (32 * S) + dk_resharded_pieces_from * (8 * S) + k);
    hw::Values<hw::bf16, kWidth> dk_resharded_pieces_element;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      dk_resharded_pieces_element[e] = dk_resharded_pieces_elements[e];
    }
    hw::store(dk_resharded_pieces + element, dk_resharded_pieces_element);
  }
}

__global__ void reverse_second_dk_resharded_pieces(const hw::bf16* dk_resharded_halves, hw::bf16* dk_resharded_pieces,
                                                   int64_t S) {
  hw::griddep_wait();
  if (hw::aligned(dk_resharded_halves, dk_resharded_pieces) && hw::fits_int32(128 * S)) {
    reverse_second_dk_resharded_pieces_by<8, uint32_t>(dk_resharded_halves, dk_resharded_pieces, S);
  } else if (hw::aligned(dk_resharded_halves, dk_resharded_pieces)) {
    reverse_second_dk_resharded_pieces_by<8, int64_t>(dk_resharded_halves, dk_resharded_pieces, S);
  } else {
    reverse_second_dk_resharded_pieces_by<1, int64_t>(dk_resharded_halves, dk_resharded_pieces, S);
  }
}

}  // namespace programs::trained_in_zigzag
