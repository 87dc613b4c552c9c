// Kernels of grouped matmuls.
#pragma once
#include "hostweave/warpgroup_products.h"

namespace hw {

#ifdef __CUDACC__

// --- 16-bit floats, by tensor cores -----------------------------------------------------------------------------------

// Processes the tiles of this block one after another. find(number, tile) returns false after the last tile. The copies of the
// next tile begin before the current tile is stored.
template <class T, class Product, class Find>
__device__ void multiply_tiles(const GroupedProblem& p, T* shared, const Find& find) {
  Product product(shared, p.wide);
  Tile<T> tile, next;
  bool exists = find(tile_of_block(0), tile);
  if (exists) product.start(tile);
  for (int round = 1; exists; ++round) {
    product.multiply(tile);
    exists = find(tile_of_block(round), next);
    if (exists) product.start(next);
    if (p.wide_result) {
      product.store(static_cast<float*>(p.result) + tile.at, p.result_pitch, tile.a.count, tile.b.count);
    } else {
      product.store(static_cast<T*>(p.result) + tile.at, p.result_pitch, tile.a.count, tile.b.count);
    }
    tile = next;
  }
}

// Multiplies each row of x by the matrix of its group.
template <class T, class Product, bool kTransposed>
__device__ void multiply_groups(const GroupedProblem& p, T* shared) {
  griddep_wait();
  GroupWalk walk(p, Product::kRows, Product::kColumns);
  multiply_tiles<T, Product>(p, shared, [&](int number, Tile<T>& tile) {
    GroupTile at;
    if (!walk.find(number, at)) return false;
    const int64_t column = at.column * Product::kColumns;
    tile.at = at.row * p.result_pitch + column, tile.depth = p.depth;
    tile.a = {static_cast<const T*>(p.x) + at.row * p.x_pitch, p.x_pitch, at.rows.end - at.row};
    tile.b = {static_cast<const T*>(p.other) + at.group * p.other_stride + column * (kTransposed ? p.other_pitch : 1),
              p.other_pitch, p.columns - column};
    return true;
  });
  fill_between_groups<T>(p, threadIdx.x, kGroupedThreads);
}

// For each group, multiplies the transposed rows of x by the rows of the other operand.
template <class T, class Product>
__device__ void multiply_rows_of_groups(const GroupedProblem& p, T* shared) {
  griddep_wait();
  const OuterWalk walk(p, Product::kRows, Product::kColumns);
  multiply_tiles<T, Product>(p, shared, [&](int number, Tile<T>& tile) {
    GroupTile at;
    if (!walk.find(number, at)) return false;
    const int64_t column = at.column * Product::kColumns, begin = at.rows.begin;
    tile.at = at.group * p.result_stride + at.row * p.result_pitch + column, tile.depth = at.rows.count();
    tile.a = {static_cast<const T*>(p.x) + begin * p.x_pitch + at.row, p.x_pitch, p.depth - at.row};
    tile.b = {static_cast<const T*>(p.other) + begin * p.other_pitch + column, p.other_pitch, p.columns - column};
    return true;
  });
}

// --- f32 and f64, without tensor cores --------------------------------------------------------------------------------

// Computes a tile of 64 x 64 results, 4 x 4 per thread. a(i, k) and b(k, j) return elements of the operands.
template <class T, class A, class B>
__device__ void multiply_plain(const A& a, const B& b, int64_t rows, int64_t columns, int64_t depth, T* to, int64_t pitch) {
  constexpr int kSide = 64, kDepth = 16;
  __shared__ T of_a[kDepth][kSide + 1], of_b[kDepth][kSide + 1];
  const int i = threadIdx.x / 16, j = threadIdx.x % 16;
  T sums[4][4] = {};
  for (int64_t k = 0; k < depth; k += kDepth) {
    __syncthreads();
    for (int at = threadIdx.x; at < kSide * kDepth; at += kGroupedThreads) {
      const int side = at % kSide, term = at / kSide;
      of_a[term][side] = side < rows && k + term < depth ? a(side, k + term) : T(0);
      of_b[term][side] = side < columns && k + term < depth ? b(k + term, side) : T(0);
    }
    __syncthreads();
    for (int term = 0; term < kDepth; ++term) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[m][n] += of_a[term][i + 16 * m] * of_b[term][j + 16 * n];
      }
    }
  }
  for (int m = 0; m < 4; ++m) {
    for (int n = 0; n < 4; ++n) {
      if (i + 16 * m < rows && j + 16 * n < columns) to[(i + 16 * m) * pitch + j + 16 * n] = sums[m][n];
    }
  }
}

template <class T>
__device__ void multiply_groups_plain(const GroupedProblem& p) {
  constexpr int kSide = 64;
  griddep_wait();
  auto *const all = static_cast<const T*>(p.x), *const others = static_cast<const T*>(p.other);
  auto* const result = static_cast<T*>(p.result);
  if (p.outer) {
    const OuterWalk walk(p, kSide, kSide);
    GroupTile at;
    for (int round = 0; walk.find(tile_of_block(round), at); ++round) {
      const int64_t group = at.group, row = at.row, column = at.column * kSide;
      const GroupRows own = at.rows;
      const T *const x = all + own.begin * p.x_pitch + row, *const y = others + own.begin * p.other_pitch + column;
      multiply_plain<T>([&](int64_t i, int64_t k) { return x[k * p.x_pitch + i]; },
                        [&](int64_t k, int64_t j) { return y[k * p.other_pitch + j]; }, p.depth - row, p.columns - column,
                        own.count(), result + group * p.result_stride + row * p.result_pitch + column, p.result_pitch);
    }
    return;
  }
  GroupWalk walk(p, kSide, kSide);
  GroupTile at;
  const int64_t of_row = p.transposed ? 1 : p.other_pitch, of_column = p.transposed ? p.other_pitch : 1;
  for (int round = 0; walk.find(tile_of_block(round), at); ++round) {
    const int64_t column = at.column * kSide;
    const T* const x = all + at.row * p.x_pitch;
    const T* const w = others + at.group * p.other_stride + column * of_column;
    multiply_plain<T>([&](int64_t i, int64_t k) { return x[i * p.x_pitch + k]; },
                      [&](int64_t k, int64_t j) { return w[k * of_row + j * of_column]; }, at.rows.end - at.row,
                      p.columns - column, p.depth, result + at.row * p.result_pitch + column, p.result_pitch);
  }
  fill_between_groups<T>(p, threadIdx.x, kGroupedThreads);
}

#endif

}  // namespace hw
