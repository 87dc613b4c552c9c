// Arguments of the kernels of grouped matmuls, shared by the kernels and their launches.
#pragma once
#include <cstdint>

namespace hw {

// x[rows, depth], with the pitch of rows in elements. `other` is a matrix [depth, columns] for each group, row-major or
// column-major with a pitch. If `outer`, `other` is [rows, columns], and the result is [groups, depth, columns].
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

// A CUtensorMap: describes an array for the tensor memory accelerator, which copies boxes of its elements.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Tensor maps of the operands and the result: three dims, 16-bit elements. A box has 64 elements of each of its rows. In a
// column-major matrix, a box has all columns of a tile.
struct GroupedMaps {
  TensorMap x, other, result;
};

}  // namespace hw
