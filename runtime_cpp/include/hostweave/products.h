// Arguments of the kernels for matmuls with few rows, shared by the kernels and their launches.
#pragma once
#include <cstdint>

#include "hostweave/device.h"

namespace hw {

// Matmuls x[rows, depth] w[depth, columns] with kCount weights. There are up to kFewRows rows, or up to kFewScaledRows rows with
// scales. x is row-major. All weights have the same layout, row-major or column-major. Pitches are in elements.
template <class T, int kCount>
struct FewRows {
  int64_t rows, depth, columns;
  const T* x;
  int64_t x_pitch;
  const T* weights[kCount];
  int64_t pitch;
};

// Scales of an operand of 8-bit floats. There is one scale per 2^size_log2 rows of x or columns of the weights, and per 128
// terms. If `block_step` is 0, all terms have the same scale. If `step` is also 0, the whole operand has one scale.
struct OperandScales {
  static constexpr int kBlockLog2 = 7;

  const float* at;
  int64_t step, block_step;
  int size_log2;

  // Scale of row or column i for term `term`.
  HW_DEVICE float of(int64_t i, int64_t term) const { return at[(i >> size_log2) * step + (term >> kBlockLog2) * block_step]; }
};

struct ProductScales {
  OperandScales x, weights;
};

enum class Activation { none, relu, gelu_tanh };

// Epilogue of a MatmulPlan: activation(scale * product + accumulate + bias), stored with the given row pitch.
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
