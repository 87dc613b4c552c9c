// Helper kernels for cuDNN: inputs for packed sequences, values of tokens outside of the sequences, and sums of partial results.
#include "hostweave/attention_kernel.h"
#include "hostweave/kernel.h"

namespace hw {

__global__ void place_sequences_of(PackedSequences p) {
  const int64_t number = blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x, all = p.batch * p.sequences;
  if (number > all) return;
  const int64_t batch = number < all ? number / p.sequences : p.batch - 1, sequence = number - batch * p.sequences;
  const int32_t* const offset = p.offsets + batch * (p.sequences + 1) + sequence;
  if (number < all) p.rows[number] = p.columns[number] = offset[1] - offset[0];
  for (int i = 0; i < p.count; ++i) {
    const auto& [offsets, batch_stride, row_stride] = p.operands[i];
    offsets[number] = static_cast<int32_t>(batch * batch_stride + *offset * row_stride);
  }
}

__global__ void fill_outside_of(OutsideSequences p) {
  const int64_t row = blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x;
  if (row >= p.batch * p.heads * p.tokens) return;
  const int64_t token = row % p.tokens, head = row / p.tokens % p.heads, batch = row / p.tokens / p.heads;
  const int32_t* const offsets = p.offsets + batch * (p.sequences + 1);
  if (token >= offsets[0] && token < offsets[p.sequences]) return;
  uint16_t* const to = p.base + batch * p.batch_stride + head * p.head_stride + token * p.row_stride;
  for (int64_t i = 0; i < p.size; ++i) to[i] = p.value;
}

template <class T>
__device__ void add_eight(void* to, const void* from) {
  alignas(16) T sums[8], terms[8];
  *reinterpret_cast<uint4*>(sums) = *static_cast<const uint4*>(to);
  *reinterpret_cast<uint4*>(terms) = *static_cast<const uint4*>(from);
  for (int i = 0; i < 8; ++i) sums[i] = T(float(sums[i]) + float(terms[i]));
  *static_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(sums);
}

__global__ void add_rows_of(AddedRows p) {
  const int64_t first = (blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x) * 8;
  if (first >= p.batch * p.heads * p.rows * p.size) return;
  const int64_t row = first / p.size, head = row / p.rows, batch = head / p.heads;
  const int64_t offset = batch * p.to.batch_stride + head % p.heads * p.to.head_stride + row % p.rows * p.to.row_stride;
  uint16_t* const to = static_cast<uint16_t*>(p.to.base) + offset + first % p.size;
  const uint16_t* const from = static_cast<const uint16_t*>(p.from) + first;
  p.is_f16 ? add_eight<f16>(to, from) : add_eight<bf16>(to, from);
}

}  // namespace hw
