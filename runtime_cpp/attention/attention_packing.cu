// What cuDNN asks of packed sequences, and leaves of them.
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
    const auto& [places, batch_stride, row_stride] = p.operands[i];
    places[number] = static_cast<int32_t>(batch * batch_stride + *offset * row_stride);
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

}  // namespace hw
