// What attention and its backward pass have in common: blocks of rows and columns as floats, and what a row sees.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "gemm.h"
#include "hostweave_cpu.h"
#include "machine.h"
#include "types.h"

namespace hostweave::cpu {

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

// The columns that rows of one of the batch see: of each the one behind the last, and the first.
struct Sight {
  std::int64_t length, diagonal;  // row i sees columns up to i + diagonal
  std::int64_t window;
  bool causal;

  Sight(const hw_cpu_attention& p, const std::int32_t* lengths, std::int64_t batch)
      : length(lengths ? std::clamp<std::int64_t>(lengths[batch], 0, p.k.rows) : p.k.rows),
        diagonal(p.diagonal + (p.from_end ? length : 0)),
        window(p.window),
        causal(p.causal != 0) {}

  std::int64_t end(std::int64_t row) const { return causal ? std::clamp<std::int64_t>(row + diagonal + 1, 0, length) : length; }
  std::int64_t begin(std::int64_t row) const { return window ? std::max<std::int64_t>(row + diagonal + 1 - window, 0) : 0; }
};

}  // namespace hostweave::cpu
