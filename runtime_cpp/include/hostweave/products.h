// What kernels of products of few rows take, for the kernels and for what launches them.
#pragma once
#include <cstdint>

namespace hw {

// The products x[rows, depth] w[depth, columns] of up to kFewRows rows with some weights. x lies row by row, and the weights
// alike: row by row, or if they are transposed column by column. What is next in the other dim lies a pitch of elements further.
template <class T, int kCount>
struct FewRows {
  int64_t rows, depth, columns;
  const T* x;
  int64_t x_pitch;
  const T* weights[kCount];
  int64_t pitch;
};

enum class Activation { none, relu, gelu_tanh };

// What a MatmulPlan makes of its product: activation(scale product + accumulate + bias), in rows that lie a pitch apart.
template <class T>
struct ProductEnd {
  T* result;
  int64_t pitch;
  float scale;
  const T* accumulate;  // null, or as the result lies
  const T* bias;        // null, or one for each column
  Activation activation;
};

}  // namespace hw
