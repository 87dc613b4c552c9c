// Arguments of this package's attention kernels. On GPUs, these kernels compute bias gradients, and the problems that cuDNN does
// not support.
#pragma once
#include <cstdint>

#include "hostweave/device.h"

// Symbol of a kernel for HW_DTYPE and heads of up to HW_HEAD elements.
#define HW_ATTENTION(kernel) HW_ATTENTION_OF(kernel, HW_DTYPE, HW_HEAD)
#define HW_ATTENTION_OF(kernel, dtype, head) HW_ATTENTION_JOINED(kernel, dtype, head)
#define HW_ATTENTION_JOINED(kernel, dtype, head) kernel##_##dtype##_##head

namespace hw {

constexpr int kAttentionTile = 64;  // rows and columns of a thread block's tile of scores
constexpr int kAttentionThreads = 256;
constexpr int kMostHead = 256;  // maximum elements of a head

// An operand as [batch, heads, rows, contiguous elements], of the problem's dtype. Strides are in elements.
template <class Memory>
struct HeadsAt {
  Memory* base;
  int64_t batch_stride, head_stride, row_stride;
};

// Gradient of the bias, summed over broadcast dims.
struct BiasGradient {
  HeadsAt<void> at;
  int64_t batch, heads, rows;
};

// Arguments of o = softmax(scale q kT + bias) v, and of its backward pass.
struct AttentionKernel {
  HeadsAt<const void> q, k, v;
  HeadsAt<void> o;
  float* lse;                // [batch, heads, rows], or null
  const int32_t* lengths;    // [batch], or null
  const int32_t* offsets;    // [batch, sequences + 1], or null: starts of packed sequences, and the end of the last
  HeadsAt<const void> bias;  // [batch, heads, rows, columns], or null; strides are 0 along broadcast dims
  int64_t batch, heads, groups, rows, columns, size, value_size, sequences;
  float scale;
  bool causal;  // row i attends to columns up to i + diagonal
  int64_t diagonal;
  bool from_end;   // adds the number of valid columns to the diagonal
  int64_t window;  // a row attends only to the last `window` of these columns; 0: to all

  HeadsAt<const void> o_gradient;
  HeadsAt<void> q_gradient, k_gradient, v_gradient;
  BiasGradient bias_gradient;
};

// Half-open range of indices.
struct Span {
  int64_t begin, end;

  HW_DEVICE bool has(int64_t column) const { return column >= begin && column < end; }
};

// Columns that each row of one batch element attends to. `begin` and `end` of these columns never decrease from one row to the
// next, up to the last row. Rows after the last row pad a tile, and attend to no columns.
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

  // Tokens of the sequence that contains `token`; empty if no sequence contains `token`.
  HW_DEVICE Span sequence(int64_t token) const {
    int64_t low = 0, high = sequences + 1;  // bounds of the number of offsets at or before the token
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
  // A range that contains all rows that attend to any of the columns `first` to `last`.
  HW_DEVICE Span rows_of(int64_t first, int64_t last) const {
    const int64_t begin = causal ? not_negative(first - diagonal) : 0;
    const int64_t end = window ? least(rows, last - diagonal + window) : rows;
    if (!offsets) return {begin, end};
    return {most(begin, sequence(first).begin), least(end, sequence(last).end)};
  }
};

// Kernels for one dtype and maximum head size; null if they are not compiled.
struct AttentionKernels {
  void (*attend)(AttentionKernel);
  void (*differentiate_queries)(AttentionKernel);
  void (*differentiate_keys)(AttentionKernel);
  void (*differentiate_bias)(AttentionKernel);
};

// Arguments of a kernel that computes cuDNN's inputs for packed sequences: the length of each sequence, and the start of each
// sequence in each operand.
struct PackedSequences {
  const int32_t* offsets;  // [batch, sequences + 1]
  int64_t batch, sequences;
  int32_t *rows, *columns;  // [batch * sequences]
  static constexpr int kMost = 9;
  int count;  // number of operands
  struct {
    int32_t* offsets;  // [batch * sequences + 1]: start of each sequence, in elements
    int64_t batch_stride, row_stride;
  } operands[kMost];
};

// Arguments of a kernel that writes `value` to the rows whose tokens belong to no sequence. Elements have 16 bits.
struct OutsideSequences {
  const int32_t* offsets;
  int64_t batch, sequences, heads, tokens, size;
  uint16_t* base;
  int64_t batch_stride, head_stride, row_stride;
  uint16_t value;
};

// Arguments of a kernel that adds a contiguous array to an array [batch, heads, rows, size] of 16-bit floats. The size is a
// multiple of 8, for vector accesses of 8 elements.
struct AddedRows {
  bool is_f16;  // otherwise bf16
  int64_t batch, heads, rows, size;
  HeadsAt<void> to;
  const void* from;
};

}  // namespace hw
