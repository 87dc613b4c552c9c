// Kernels of grouped matmuls. Bounds of groups are read on the device: each block takes one tile of results after another, and
// finds its group by a scan over the groups.
#pragma once
#include "hostweave/grouped_problem.h"
#include "hostweave/kernel.h"

namespace hw {

constexpr int kGroupedThreads = 256;

#ifdef __CUDACC__

// i, at least 0 and at most `most`.
__device__ inline int64_t limited(int64_t i, int64_t most) { return i < 0 ? 0 : i < most ? i : most; }

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

// --- tiles in shared memory -------------------------------------------------------------------------------------------

// kRows x kColumns elements of 16 bits, in chunks of 8 that are permuted so that the rows of a matrix of 8 x 8 lie in all banks.
template <class T, int kRows, int kColumns>
struct SharedTile {
  static constexpr int kChunks = kColumns / 8;

  T* at;

  __device__ T* chunk(int row, int chunk) const {
    const int turned = kChunks == 4 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
    return at + row * kColumns + turned * 8;
  }

  // Starts to copy what exists: `rows` x `columns` elements. The rest is zeros.
  __device__ void copy(const T* from, int64_t pitch, int64_t rows, int64_t columns, bool wide) const {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kChunks; i += kGroupedThreads) {
      const int row = i / kChunks, place = i % kChunks;
      const int64_t left = row < rows ? columns - place * 8 : 0;
      const int count = static_cast<int>(limited(left, 8));
      const T* const source = count > 0 ? from + row * pitch + place * 8 : from;
      T* const to = chunk(row, place);
      if (wide) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
                     "l"(source), "r"(count * 2)
                     : "memory");
      } else {
        for (int j = 0; j < 8; ++j) to[j] = j < count ? source[j] : T(0.0f);
      }
    }
  }

  // Four matrices of 8 x 8: lane i gives the row of one, and gets two elements of each.
  __device__ void load(unsigned (&to)[4], int row, int place) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(chunk(row, place)))));
  }
  __device__ void load_transposed(unsigned (&to)[4], int row, int place) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(chunk(row, place)))));
  }
};

__device__ inline void multiply_tile(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_tile(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, f16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One tile of a product of 16-bit floats: a [kRows, depth] times b [depth, kColumns]. If kTurnedA, a is stored column by column;
// if kTurnedB, b is. Stages of kDepth terms are copied while earlier ones are multiplied.
template <class T, int kRows, int kColumns, int kWarpRows, bool kTurnedA, bool kTurnedB>
struct TileProduct {
  static constexpr int kDepth = 32, kWarps = kGroupedThreads / 32;
  static constexpr int kStages = kRows == 16 ? 5 : kRows == 64 ? 4 : 3;  // of at most 48 KiB
  static constexpr int kWarpsDown = kRows / kWarpRows, kWarpColumns = kColumns / (kWarps / kWarpsDown);
  static constexpr int kStage = (kRows + kColumns) * kDepth;

  using A = SharedTile<T, kTurnedA ? kDepth : kRows, kTurnedA ? kRows : kDepth>;
  using B = SharedTile<T, kTurnedB ? kColumns : kDepth, kTurnedB ? kDepth : kColumns>;

  struct Operand {
    const T* at;
    int64_t pitch, count;  // elements along the dim that is not the depth
  };

  float sums[kWarpRows / 16][kWarpColumns / 8][4];

  __device__ void multiply(T* shared, const Operand& a, const Operand& b, int64_t depth, bool wide) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (auto& each : row) each[0] = each[1] = each[2] = each[3] = 0;
    }
    const auto copy = [&](int64_t step) {
      const int64_t k = step * kDepth, left = depth - k;
      T* const stage = shared + step % kStages * kStage;
      if (left > 0) {
        A{stage}.copy(a.at + (kTurnedA ? k * a.pitch : k), a.pitch, kTurnedA ? left : a.count, kTurnedA ? a.count : left, wide);
        B{stage + kRows * kDepth}.copy(b.at + (kTurnedB ? k : k * b.pitch), b.pitch, kTurnedB ? b.count : left,
                                       kTurnedB ? left : b.count, wide);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const int64_t steps = (depth + kDepth - 1) / kDepth;
    __syncthreads();  // the tile before was read
    for (int i = 0; i < kStages - 1; ++i) copy(i);
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      copy(step + kStages - 1);
      T* const stage = shared + step % kStages * kStage;
      add({stage}, {stage + kRows * kDepth});
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }

  __device__ int first_row() const { return threadIdx.x / 32 % kWarpsDown * kWarpRows; }
  __device__ int first_column() const { return threadIdx.x / 32 / kWarpsDown * kWarpColumns; }

  __device__ void add(const A& a, const B& b) {
    const int lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      unsigned of_a[kWarpRows / 16][4], of_b[kWarpColumns / 16][4];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        const int m = first_row() + i * 16;
        if constexpr (kTurnedA) {
          a.load_transposed(of_a[i], k + matrix / 2 * 8 + in_matrix, m / 8 + matrix % 2);
        } else {
          a.load(of_a[i], m + matrix % 2 * 8 + in_matrix, k / 8 + matrix / 2);
        }
      }
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        const int n = first_column() + j * 16;
        if constexpr (kTurnedB) {
          b.load(of_b[j], n + matrix / 2 * 8 + in_matrix, k / 8 + matrix % 2);
        } else {
          b.load_transposed(of_b[j], k + matrix % 2 * 8 + in_matrix, n / 8 + matrix / 2);
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          multiply_tile(sums[i][j], of_a[i], of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1], T());
        }
      }
    }
  }

  // Stores the part of the tile that exists.
  template <class Result>
  __device__ void store(Result* to, int64_t pitch, int64_t rows, int64_t columns) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + i * 16 + half * 8 + lane / 4;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          const int column = first_column() + j * 8 + lane % 4 * 2;
          Result* const at = to + row * pitch + column;
          const Values<Result, 2> pair{{Result(sums[i][j][half * 2]), Result(sums[i][j][half * 2 + 1])}};
          if (column + 1 < columns && reinterpret_cast<uintptr_t>(at) % (2 * sizeof(Result)) == 0) {
            hw::store(at, pair);
          } else {
            if (column < columns) at[0] = pair[0];
            if (column + 1 < columns) at[1] = pair[1];
          }
        }
      }
    }
  }
};

// Stores a tile in the dtype of the result.
template <class T, class Product>
__device__ void store_tile(const Product& product, const GroupedProblem& p, int64_t offset, int64_t rows, int64_t columns) {
  if (p.wide_result) {
    product.store(static_cast<float*>(p.result) + offset, p.result_pitch, rows, columns);
  } else {
    product.store(static_cast<T*>(p.result) + offset, p.result_pitch, rows, columns);
  }
}

template <class T, int kRows, int kWarpRows, bool kTransposed>
__device__ void multiply_groups(const GroupedProblem& p) {
  constexpr int kColumns = 128;
  using Product = TileProduct<T, kRows, kColumns, kWarpRows, false, kTransposed>;
  __shared__ alignas(128) T shared[Product::kStage * Product::kStages];
  griddep_wait();
  GroupWalk walk(p, kRows, (p.columns + kColumns - 1) / kColumns);
  for (int64_t tile = blockIdx.x; walk.find(tile); tile += gridDim.x) {
    const int64_t column = walk.column * kColumns, rows = walk.rows.end - walk.row, columns = p.columns - column;
    const T* const x = static_cast<const T*>(p.x) + walk.row * p.x_pitch;
    const T* const w = static_cast<const T*>(p.other) + walk.group * p.other_stride + column * (kTransposed ? p.other_pitch : 1);
    Product product;
    product.multiply(shared, {x, p.x_pitch, rows}, {w, p.other_pitch, columns}, p.depth, p.wide);
    store_tile<T>(product, p, walk.row * p.result_pitch + column, rows, columns);
  }
  if (p.wide_result) {
    fill_between_groups<float>(p);
  } else {
    fill_between_groups<T>(p);
  }
}

template <class T>
__device__ void multiply_rows_of_groups(const GroupedProblem& p) {
  constexpr int kRows = 128, kColumns = 128;
  using Product = TileProduct<T, kRows, kColumns, 64, true, false>;
  __shared__ alignas(128) T shared[Product::kStage * Product::kStages];
  griddep_wait();
  const int64_t down = (p.depth + kRows - 1) / kRows, across = (p.columns + kColumns - 1) / kColumns;
  for (int64_t tile = blockIdx.x; tile < p.groups * down * across; tile += gridDim.x) {
    const int64_t group = tile / (down * across), row = tile % down * kRows, column = tile / down % across * kColumns;
    const GroupRows own = rows_of(p, group);
    const T* const x = static_cast<const T*>(p.x) + own.begin * p.x_pitch + row;
    const T* const y = static_cast<const T*>(p.other) + own.begin * p.other_pitch + column;
    const int64_t rows = p.depth - row, columns = p.columns - column;
    Product product;
    product.multiply(shared, {x, p.x_pitch, rows}, {y, p.other_pitch, columns}, own.count(), p.wide);
    store_tile<T>(product, p, group * p.result_stride + row * p.result_pitch + column, rows, columns);
  }
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
