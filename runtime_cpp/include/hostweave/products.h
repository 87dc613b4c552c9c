// Arguments of the kernels for matmuls with few rows, shared by the kernels and their launches.
#pragma once
#include <cstdint>

namespace hw {

// Matmuls x[rows, depth] w[depth, columns] of up to kFewRows rows with kCount weights. x is row-major. All weights have one
// layout: row-major, or column-major if transposed, with the given pitch in elements.
template <class T, int kCount>
struct FewRows {
  int64_t rows, depth, columns;
  const T* x;
  int64_t x_pitch;
  const T* weights[kCount];
  int64_t pitch;
};

enum class Activation { none, relu, gelu_tanh };

// Epilogue of a MatmulPlan: activation(scale product + accumulate + bias), stored with the given row pitch.
template <class T>
struct ProductEnd {
  T* result;
  int64_t pitch;
  float scale;
  const T* accumulate;  // null, or with the layout of the result
  const T* bias;        // null, or one per column
  Activation activation;
};

}  // namespace hw
