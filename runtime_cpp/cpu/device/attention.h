// What attention and its backward pass have in common: blocks of rows and columns as floats, and what a row sees.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gemm.h"
#include "hostweave_cpu.h"
#include "machine.h"
#include "types.h"

namespace hostweave::cpu {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kRows = 64, kColumns = 256;  // of a block of scores

inline std::int64_t offset(const hw_cpu_heads& x, std::int64_t batch, std::int64_t head) {
  return batch * x.batch_stride + head * x.head_stride;
}

inline void add_ranges(Ranges& ranges, const void* base, const hw_cpu_heads& x, cudaDataType_t type, bool write) {
  const std::size_t size = type_size(type);
  for (std::int64_t batch = 0; batch < x.batch; ++batch) {
    for (std::int64_t head = 0; head < x.heads; ++head) {
      const void* const at = shift(base, offset(x, batch, head), type);
      ranges.push_back(write ? write_of(at, x.size * size, x.rows, x.row_stride * size)
                             : read_of(at, x.size * size, x.rows, x.row_stride * size));
    }
  }
}

// A row-major matrix as it lies, or transposed.
struct Matrix {
  const float* data;
  bool transposed = false;
};

// Row-major c[rows, columns] = alpha a[rows, inner] b[inner, columns] + beta c.
inline void product(Matrix a, Matrix b, float* c, std::int64_t rows, std::int64_t columns, std::int64_t inner, float alpha,
                    float beta) {
  Gemm g;  // of column-major matrices: c' = b' a'
  g.transpose_a = b.transposed, g.transpose_b = a.transposed;
  g.m = columns, g.n = rows, g.k = inner;
  g.alpha = alpha, g.beta = beta;
  g.a = b.data, g.lda = b.transposed ? inner : columns;
  g.b = a.data, g.ldb = a.transposed ? rows : inner;
  g.c = g.d = c, g.ldc = g.ldd = columns;
  multiply_floats(g);
}

// `count` rows from `first` on, side by side.
inline void load_rows(std::vector<float>& to, const void* base, const hw_cpu_heads& x, std::int64_t first, std::int64_t count,
                      cudaDataType_t type) {
  to.resize(count * x.size);
  for (std::int64_t row = 0; row < count; ++row) {
    load_row(to.data() + row * x.size, shift(base, (first + row) * x.row_stride, type), x.size, type);
  }
}

// The columns that rows of one of the batch see: of each the one behind the last, and the first. Neither decreases with the row.
struct Sight {
  std::int64_t length, diagonal;  // row i sees columns up to i + diagonal
  std::int64_t window, sequences;
  bool causal;
  const std::int32_t* offsets;  // of the sequences, or null

  Sight(const hw_cpu_attention& p, const hw_cpu_attention_masks& masks, std::int64_t batch)
      : length(masks.lengths ? std::clamp<std::int64_t>(masks.lengths[batch], 0, p.k.rows) : p.k.rows),
        diagonal(p.diagonal + (p.from_end ? length : 0)),
        window(p.window),
        sequences(p.sequences),
        causal(p.causal != 0),
        offsets(masks.offsets ? masks.offsets + batch * (sequences + 1) : nullptr) {}

  std::int64_t end(std::int64_t row) const {
    const std::int64_t last = causal ? std::clamp<std::int64_t>(row + diagonal + 1, 0, length) : length;
    return offsets ? std::min<std::int64_t>(last, offsets[std::min(begun(row), sequences)]) : last;
  }
  std::int64_t begin(std::int64_t row) const {
    const std::int64_t first = window ? std::max<std::int64_t>(row + diagonal + 1 - window, 0) : 0;
    return offsets ? std::max<std::int64_t>(first, offsets[std::max<std::int64_t>(begun(row) - 1, 0)]) : first;
  }

 private:
  // How many offsets are not behind a row: before the first sequence, and behind the last one, it sees nothing.
  std::int64_t begun(std::int64_t row) const { return std::upper_bound(offsets, offsets + sequences + 1, row) - offsets; }
};

// Adds the bias to some of the scores, row-major.
inline void add_bias(float* scores, const hw_cpu_attention& p, const void* bias, std::int64_t batch, std::int64_t head,
                     std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
  if (!bias) return;
  const auto type = static_cast<cudaDataType_t>(p.dtype);
  thread_local std::vector<float> terms;
  terms.resize(columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    load_row(terms.data(), shift(bias, offset(p.bias, batch, head) + (row + i) * p.bias.row_stride + column, type), columns,
             type);
    for (std::int64_t j = 0; j < columns; ++j) scores[i * columns + j] += terms[j];
  }
}

// What the masks of a call read.
inline void add_masks(Ranges& ranges, const hw_cpu_attention& p, const hw_cpu_attention_masks& masks) {
  if (masks.lengths) ranges.push_back(read_of(masks.lengths, p.q.batch * sizeof(std::int32_t)));
  if (masks.bias) add_ranges(ranges, masks.bias, p.bias, static_cast<cudaDataType_t>(p.dtype), false);
  if (masks.offsets) ranges.push_back(read_of(masks.offsets, p.q.batch * (p.sequences + 1) * sizeof(std::int32_t)));
}

}  // namespace hostweave::cpu
