// Attention of f32 on CUDA, where cuDNN has none: what its kernels take, for them and for what launches them.
#pragma once
#include <cstdint>

namespace hw {

constexpr int kAttentionTile = 64;  // rows, and columns, of the scores that a thread block has at once
constexpr int kAttentionThreads = 256;
constexpr int kMostHead = 256;  // elements of a head

// An operand as [batch, heads, rows, elements side by side]; strides are in elements.
template <class T>
struct HeadsAt {
  T* base;
  int64_t batch_stride, head_stride, row_stride;
};

// o = softmax(scale q kT) v, and its backward pass by the gradient of o.
struct AttentionF32 {
  HeadsAt<const float> q, k, v;
  HeadsAt<float> o;
  float* lse;              // [batch, heads, rows], or null
  const int32_t* lengths;  // [batch], or null
  int64_t batch, heads, groups, rows, columns, size, value_size;
  float scale;
  bool causal;       // a row sees columns up to the diagonal,
  int64_t diagonal;  // to its index and this,
  bool from_end;     // and the length
  int64_t window;    // and only the last so many of them; 0: all

  HeadsAt<const float> o_gradient;
  HeadsAt<float> q_gradient, k_gradient, v_gradient;
};

}  // namespace hw
