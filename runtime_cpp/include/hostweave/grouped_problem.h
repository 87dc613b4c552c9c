// Arguments of the kernels of grouped matmuls, shared by the kernels and their launches.
#pragma once
#include <cstdint>

namespace hw {

// x is [rows, depth]. `other` has a matrix [depth, columns] for each group, row-major or column-major. If `outer`, `other` is
// [rows, columns], and the result is [groups, depth, columns]. Pitches and strides are in elements.
struct GroupedProblem {
  bool outer, transposed;  // transposed: the matrices are column-major
  bool wide_result;        // the result is f32, and the operands have 16 bits
  bool wide;               // 16-byte reads are possible
  int64_t groups, rows, depth, columns;
  int64_t x_pitch, other_pitch, other_stride, result_pitch, result_stride;
  int64_t first;  // global index of row 0
  const void *x, *other;
  const int32_t *starts, *ends;
  void* result;
};

// A CUtensorMap: describes an array to the tensor memory accelerator. The accelerator copies boxes of elements of the array.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Tensor maps of the operands and the result: three dims, 16-bit elements. Each row of a box has 64 elements. In a column-major
// matrix, a box has all columns of a tile.
struct GroupedMaps {
  TensorMap x, other, result;
};

}  // namespace hw
