// Attention by kernels of ours on CUDA, where cuDNN has none: what they take, for them and for what launches them.
#pragma once
#include <cstdint>

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
