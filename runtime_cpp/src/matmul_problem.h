// Describes a matmul of strided arrays as strided-batched matmuls of cuBLASLt.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "hostweave/matmul.h"

namespace hw {

struct Matrix {
  int64_t rows, columns, row_stride, column_stride;

  Matrix transposed() const { return {columns, rows, column_stride, row_stride}; }
  bool row_major() const { return column_stride == 1 || columns == 1; }
  int64_t span() const { return (rows - 1) * row_stride + (columns - 1) * column_stride + 1; }  // extent in elements
  bool valid() const { return row_major() || row_stride == 1 || rows == 1; }
  int64_t leading_dimension() const {
    return row_major() ? std::max(rows == 1 ? 0 : row_stride, columns) : std::max(columns == 1 ? 0 : column_stride, rows);
  }
};

// A leading dim, and the strides between its matrices in a, b and c. A stride is 0 if a matrix is broadcast along the dim.
struct Batch {
  int64_t count = 1, a = 0, b = 0, c = 0;
};

// One strided-batched matmul, repeated over `outer`.
struct Problem {
  Matrix a, b, c;
  Batch batch;
  std::vector<Batch> outer;
};

inline Matrix last_two_dims(const Strided& x) {
  const int i = x.shape.ndim - 2;
  return {x.shape[i], x.shape[i + 1], x.strides[i], x.strides[i + 1]};
}

inline int64_t batch_stride(const Strided& x, int dim_from_last) {
  const int i = x.shape.ndim - dim_from_last;
  return i < 0 || x.shape[i] == 1 ? 0 : x.strides[i];
}

// Leading dims, innermost first, with adjacent dims merged if one stride covers both in each of a, b and c.
inline std::vector<Batch> batches(const Strided& a, const Strided& b, const Strided& c) {
  std::vector<Batch> result;
  for (int dim = 3; dim <= c.shape.ndim; ++dim) {
    const Batch next{c.shape[c.shape.ndim - dim], batch_stride(a, dim), batch_stride(b, dim), batch_stride(c, dim)};
    if (next.count == 1) continue;
    if (!result.empty()) {
      Batch& last = result.back();
      if (next.a == last.a * last.count && next.b == last.b * last.count && next.c == last.c * last.count) {
        last.count *= next.count;
        continue;
      }
    }
    result.push_back(next);
  }
  return result;
}

// True if the rows of all matrices of a batch form one tall matrix.
inline bool rows_follow(const Matrix& x, int64_t stride) {
  return stride == x.rows * x.row_stride || (x.rows == 1 && x.row_major());
}

inline Problem simplified(const Strided& a, const Strided& b, const Strided& c) {
  Problem p{last_two_dims(a), last_two_dims(b), last_two_dims(c), {}, batches(a, b, c)};
  const auto foldable = [&](const Batch& batch) {
    return batch.b == 0 && rows_follow(p.a, batch.a) && rows_follow(p.c, batch.c);
  };
  if (!p.outer.empty() && foldable(p.outer.front())) {  // One tall matmul replaces the batch.
    const Batch batch = p.outer.front();
    if (p.a.rows == 1) p.a.row_stride = batch.a, p.c.row_stride = batch.c;
    p.a.rows = p.c.rows = p.a.rows * batch.count;
    p.outer.erase(p.outer.begin());
  }
  const auto largest = std::ranges::max_element(p.outer, {}, &Batch::count);
  if (largest != p.outer.end()) {
    p.batch = *largest;
    p.outer.erase(largest);
  }
  if (!p.c.row_major()) {  // c' = b' a'
    p.c = p.c.transposed();
    p.a = std::exchange(p.b, p.a.transposed()).transposed();
    std::swap(p.batch.a, p.batch.b);
    for (Batch& batch : p.outer) std::swap(batch.a, batch.b);
  }
  return p;
}

}  // namespace hw
