// Kernels of grouped matmuls. Bounds of groups are read on the device: each block takes one tile of results after another, and
// finds its group by a scan over the groups.
#pragma once
#include "hostweave/grouped_problem.h"
#include "hostweave/warpgroup_products.h"

namespace hw {

#ifdef __CUDACC__

// Rows of a group, within those that the rank has.
struct GroupRows {
  int64_t begin, end;

  __device__ int64_t count() const { return end > begin ? end - begin : 0; }
};

__device__ inline GroupRows rows_of(const GroupedProblem& p, int64_t group) {
  return {limited(p.starts[group] - p.first, p.rows), limited(p.ends[group] - p.first, p.rows)};
}

// Finds the tile of a group that a tile number means. Numbers increase, and all threads of a warp ask together.
class GroupWalk {
 public:
  __device__ GroupWalk(const GroupedProblem& p, int tile_rows, int64_t tiles_of_columns)
      : p_(p), tile_rows_(tile_rows), tiles_of_columns_(tiles_of_columns) {
    scan();
  }

  int64_t group, row, column;  // of the tile that was found: its first row and its tile of columns
  GroupRows rows;

  __device__ bool find(int64_t tile) {
    while (tile - before_ >= total_ * tiles_of_columns_) {
      before_ += total_ * tiles_of_columns_, base_ += 32;
      if (base_ >= p_.groups) return false;
      scan();
    }
    const int64_t place = tile - before_;
    const int lane = __ffs(__ballot_sync(~0u, place < sums_ * tiles_of_columns_)) - 1;
    const int64_t own = __shfl_sync(~0u, tiles_, lane),
                  in_group = place - __shfl_sync(~0u, sums_ - tiles_, lane) * tiles_of_columns_;
    rows = {__shfl_sync(~0u, lane_rows_.begin, lane), __shfl_sync(~0u, lane_rows_.end, lane)};
    group = base_ + lane, row = rows.begin + in_group % own * tile_rows_, column = in_group / own;
    return true;
  }

 private:
  __device__ void scan() {
    const int lane = threadIdx.x % 32;
    lane_rows_ = base_ + lane < p_.groups ? rows_of(p_, base_ + lane) : GroupRows{0, 0};
    tiles_ = (lane_rows_.count() + tile_rows_ - 1) / tile_rows_;
    sums_ = tiles_;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sums_, distance);
      if (lane >= distance) sums_ += other;
    }
    total_ = __shfl_sync(~0u, sums_, 31);
  }

  const GroupedProblem& p_;
  int tile_rows_;
  int64_t tiles_of_columns_, base_ = 0, before_ = 0, tiles_ = 0, sums_ = 0, total_ = 0;
  GroupRows lane_rows_{};
};

// Writes zeros to rows without a group: those before the first one, between two, and after the last one.
template <class Result>
__device__ void fill_between_groups(const GroupedProblem& p) {
  auto* const result = static_cast<Result*>(p.result);
  int64_t last = 0;  // end of the groups so far
  for (int64_t base = 0; base <= p.groups; base += 32) {
    const int64_t e = base + threadIdx.x % 32;
    const GroupRows own = e < p.groups ? rows_of(p, e) : GroupRows{p.rows, p.rows};
    const int64_t begin = e < p.groups && own.count() == 0 ? -1 : own.begin;  // an empty group ends nothing
    int64_t end = begin < 0 ? 0 : own.end;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(~0u, end, distance);
      if (threadIdx.x % 32 >= distance && other > end) end = other;
    }
    int64_t before = __shfl_up_sync(~0u, end, 1);
    if (threadIdx.x % 32 == 0 || before < last) before = last;
    for (unsigned gaps = __ballot_sync(~0u, begin > before); gaps; gaps &= gaps - 1) {
      const int lane = __ffs(gaps) - 1;
      const int64_t from = __shfl_sync(~0u, before, lane), to = __shfl_sync(~0u, begin, lane);
      for (int64_t row = from + blockIdx.x; row < to; row += gridDim.x) {
        for (int64_t i = threadIdx.x; i < p.columns; i += blockDim.x) result[row * p.result_pitch + i] = Result(0.0f);
      }
    }
    const int64_t end_of_all = __shfl_sync(~0u, end, 31);
    if (end_of_all > last) last = end_of_all;
  }
}

// --- 16-bit floats, by matrix units -----------------------------------------------------------------------------------

// The tiles of this block one after another. find(number, tile) is false behind the last tile. Copies of a tile begin before the
// one before it is stored.
template <class T, class Product, class Find>
__device__ void multiply_tiles(const GroupedProblem& p, T* shared, const Find& find) {
  Product product(shared, p.wide);
  Tile<T> tile, next;
  bool exists = find(int64_t{blockIdx.x}, tile);
  if (exists) product.start(tile);
  for (int64_t number = int64_t{blockIdx.x} + gridDim.x; exists; number += gridDim.x) {
    product.multiply(tile);
    exists = find(number, next);
    if (exists) product.start(next);
    if (p.wide_result) {
      product.store(static_cast<float*>(p.result) + tile.at, p.result_pitch, tile.a.count, tile.b.count);
    } else {
      product.store(static_cast<T*>(p.result) + tile.at, p.result_pitch, tile.a.count, tile.b.count);
    }
    tile = next;
  }
}

// Each row of x times the matrix of its group.
template <class T, class Product, bool kTransposed>
__device__ void multiply_groups(const GroupedProblem& p, T* shared) {
  griddep_wait();
  GroupWalk walk(p, Product::kRows, (p.columns + Product::kColumns - 1) / Product::kColumns);
  multiply_tiles<T, Product>(p, shared, [&](int64_t number, Tile<T>& tile) {
    if (!walk.find(number)) return false;
    const int64_t column = walk.column * Product::kColumns;
    tile.at = walk.row * p.result_pitch + column, tile.depth = p.depth;
    tile.a = {static_cast<const T*>(p.x) + walk.row * p.x_pitch, p.x_pitch, walk.rows.end - walk.row};
    tile.b = {static_cast<const T*>(p.other) + walk.group * p.other_stride + column * (kTransposed ? p.other_pitch : 1),
              p.other_pitch, p.columns - column};
    return true;
  });
  if (p.wide_result) {
    fill_between_groups<float>(p);
  } else {
    fill_between_groups<T>(p);
  }
}

// For each group, its rows of x, transposed, times its rows of the other operand.
template <class T, class Product>
__device__ void multiply_rows_of_groups(const GroupedProblem& p, T* shared) {
  griddep_wait();
  const int64_t down = (p.depth + Product::kRows - 1) / Product::kRows,
                across = (p.columns + Product::kColumns - 1) / Product::kColumns;
  multiply_tiles<T, Product>(p, shared, [&](int64_t number, Tile<T>& tile) {
    const int64_t group = number / (down * across), row = number % down * Product::kRows,
                  column = number / down % across * Product::kColumns;
    if (group >= p.groups) return false;
    const GroupRows own = rows_of(p, group);
    tile.at = group * p.result_stride + row * p.result_pitch + column, tile.depth = own.count();
    tile.a = {static_cast<const T*>(p.x) + own.begin * p.x_pitch + row, p.x_pitch, p.depth - row};
    tile.b = {static_cast<const T*>(p.other) + own.begin * p.other_pitch + column, p.other_pitch, p.columns - column};
    return true;
  });
}

// --- f32 and f64, without tensor cores --------------------------------------------------------------------------------

// One tile of 64 x 64 results, 4 x 4 a thread. a(i, k) and b(k, j) give elements.
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
  const int64_t across = (p.columns + kSide - 1) / kSide;
  if (p.outer) {
    const int64_t down = (p.depth + kSide - 1) / kSide;
    for (int64_t tile = blockIdx.x; tile < p.groups * down * across; tile += gridDim.x) {
      const int64_t group = tile / (down * across), row = tile % down * kSide, column = tile / down % across * kSide;
      const GroupRows own = rows_of(p, group);
      const T *const x = all + own.begin * p.x_pitch + row, *const y = others + own.begin * p.other_pitch + column;
      multiply_plain<T>([&](int64_t i, int64_t k) { return x[k * p.x_pitch + i]; },
                        [&](int64_t k, int64_t j) { return y[k * p.other_pitch + j]; }, p.depth - row, p.columns - column,
                        own.count(), result + group * p.result_stride + row * p.result_pitch + column, p.result_pitch);
    }
    return;
  }
  GroupWalk walk(p, kSide, across);
  const int64_t of_row = p.transposed ? 1 : p.other_pitch, of_column = p.transposed ? p.other_pitch : 1;
  for (int64_t tile = blockIdx.x; walk.find(tile); tile += gridDim.x) {
    const int64_t column = walk.column * kSide;
    const T* const x = all + walk.row * p.x_pitch;
    const T* const w = others + walk.group * p.other_stride + column * of_column;
    multiply_plain<T>([&](int64_t i, int64_t k) { return x[i * p.x_pitch + k]; },
                      [&](int64_t k, int64_t j) { return w[k * of_row + j * of_column]; }, walk.rows.end - walk.row,
                      p.columns - column, p.depth, result + walk.row * p.result_pitch + column, p.result_pitch);
  }
  fill_between_groups<T>(p);
}

#endif

}  // namespace hw
