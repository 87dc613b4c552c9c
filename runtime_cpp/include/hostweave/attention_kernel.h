// Attention by kernels of ours on CUDA, where cuDNN has none: what they take, for them and for what launches them.
#pragma once
#include <cstdint>

#include "hostweave/device.h"

// The name of one of the kernels of HW_DTYPE, for heads of up to HW_HEAD elements.
#define HW_ATTENTION(kernel) HW_ATTENTION_OF(kernel, HW_DTYPE, HW_HEAD)
#define HW_ATTENTION_OF(kernel, dtype, head) HW_ATTENTION_JOINED(kernel, dtype, head)
#define HW_ATTENTION_JOINED(kernel, dtype, head) kernel##_##dtype##_##head

namespace hw {

constexpr int kAttentionTile = 64;  // rows, and columns, of the scores that a thread block has at once
constexpr int kAttentionThreads = 256;
constexpr int kMostHead = 256;  // elements of a head

// An operand as [batch, heads, rows, elements side by side], of the problem's dtype; strides are in elements.
template <class Memory>
struct HeadsAt {
  Memory* base;
  int64_t batch_stride, head_stride, row_stride;
};

// The gradient of the bias: a dim that this has once is summed over.
struct BiasGradient {
  HeadsAt<void> at;
  int64_t batch, heads, rows;
};

// o = softmax(scale q kT + bias) v, and its backward pass by the gradient of o.
struct AttentionKernel {
  HeadsAt<const void> q, k, v;
  HeadsAt<void> o;
  float* lse;                // [batch, heads, rows], or null
  const int32_t* lengths;    // [batch], or null
  const int32_t* offsets;    // [batch, sequences + 1], or null: where sequences begin of which a row sees its own
  HeadsAt<const void> bias;  // [batch, heads, rows, columns], or null; strides are 0 along what it has once
  int64_t batch, heads, groups, rows, columns, size, value_size, sequences;
  float scale;
  bool causal;       // a row sees columns up to the diagonal,
  int64_t diagonal;  // to its index and this,
  bool from_end;     // and the length
  int64_t window;    // and only the last so many of them; 0: all

  HeadsAt<const void> o_gradient;
  HeadsAt<void> q_gradient, k_gradient, v_gradient;
  BiasGradient bias_gradient;
};

// The columns from one to the one before another.
struct Span {
  int64_t begin, end;

  HW_DEVICE bool has(int64_t column) const { return column >= begin && column < end; }
};

// The columns that rows of one of the batch see: neither where they begin nor where they end decreases with the row.
struct Sight {
  int64_t rows, length, diagonal, window, sequences;
  bool causal;
  const int32_t* offsets;

  HW_DEVICE Sight(const AttentionKernel& p, int64_t batch)
      : rows(p.rows),
        length(p.lengths ? least(not_negative(p.lengths[batch]), p.columns) : p.columns),
        diagonal(p.diagonal + (p.from_end ? length : 0)),
        window(p.window),
        sequences(p.sequences),
        causal(p.causal),
        offsets(p.offsets ? p.offsets + batch * (p.sequences + 1) : nullptr) {}

  HW_DEVICE static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  HW_DEVICE static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
  HW_DEVICE static int64_t not_negative(int64_t a) { return most(a, 0); }

  // The sequence that a token is of; before the first one, and behind the last, what it sees is empty.
  HW_DEVICE Span sequence(int64_t token) const {
    int64_t low = 0, high = sequences + 1;  // how many offsets are not behind it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      offsets[middle] <= token ? low = middle + 1 : high = middle;
    }
    return {offsets[not_negative(low - 1)], offsets[least(low, sequences)]};
  }
  HW_DEVICE Span of(int64_t row) const {
    if (row >= rows) return {0, 0};
    const int64_t begin = window ? not_negative(row + diagonal + 1 - window) : 0;
    const int64_t end = causal ? not_negative(least(row + diagonal + 1, length)) : length;
    if (!offsets) return {begin, end};
    const Span own = sequence(row);
    return {most(begin, own.begin), least(end, own.end)};
  }
  // The rows that see some of these columns are among them.
  HW_DEVICE Span rows_of(int64_t first, int64_t last) const {
    const int64_t begin = causal ? not_negative(first - diagonal) : 0;
    const int64_t end = window ? least(rows, last - diagonal + window) : rows;
    if (!offsets) return {begin, end};
    return {most(begin, sequence(first).begin), least(end, sequence(last).end)};
  }
};

// Kernels of one dtype, of heads of up to so many elements: null where they are not compiled.
struct AttentionKernels {
  void (*attend)(AttentionKernel);
  void (*differentiate_queries)(AttentionKernel);
  void (*differentiate_keys)(AttentionKernel);
  void (*differentiate_bias)(AttentionKernel);
};

// What cuDNN asks of sequences that are packed: how many tokens each has, and where it begins in each operand.
struct PackedSequences {
  const int32_t* offsets;  // [batch, sequences + 1]
  int64_t batch, sequences;
  int32_t *rows, *columns;  // [batch * sequences]
  static constexpr int kMost = 9;
  int count;  // of operands
  struct {
    int32_t* places;  // [batch * sequences + 1], in elements
    int64_t batch_stride, row_stride;
  } operands[kMost];
};

// What tokens of no sequence have in an operand of 16 bits.
struct OutsideSequences {
  const int32_t* offsets;
  int64_t batch, sequences, heads, tokens, size;
  uint16_t* base;
  int64_t batch_stride, head_stride, row_stride;
  uint16_t value;
};

// Rows of 16-bit floats to which others are added, which lie one behind the other: [batch, heads, rows, size]. The size is a
// multiple of 8, and 8 elements are read at once.
struct AddedRows {
  bool is_f16;  // or bf16
  int64_t batch, heads, rows, size;
  HeadsAt<void> to;
  const void* from;
};

}  // namespace hw
