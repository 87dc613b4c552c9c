// Tiles of operands in shared memory, and their products by mma.sync, for GPUs since Ampere.
#pragma once
#include "hostweave/kernel.h"
#include "hostweave/tensor_core.h"

namespace hw {

constexpr int kGroupedThreads = 256;

// Products on Hopper: a warp of the first warpgroup copies tiles, and two other warpgroups multiply the tiles.
constexpr int kWarpgroupThreads = kGroupedThreads + 128;
constexpr int kWarpgroupRows = 128, kWarpgroupColumns = 256;  // size of a tile
constexpr int kWarpgroupStages = 4;
constexpr int kWarpgroupShared = kWarpgroupStages * 48 * 1024 + 32 * 1024 + 1024;  // bytes of stages, results and alignment

// Operands of products on Hopper. matrices: rows of a group times a row-major matrix. transposed_matrices: rows of a group times
// a column-major matrix. rows: transposed rows of a group times rows of the same group. few_rows: like rows, but groups have at
// most kFewRowsOfGroup rows on average.
enum class Operands { matrices, transposed_matrices, rows, few_rows };
constexpr int kFewRowsOfGroup = 64, kFewBoxRows = 16;

#ifdef __CUDACC__

// Clamps i to the range from 0 to `most`.
__device__ inline int64_t limited(int64_t i, int64_t most) { return i < 0 ? 0 : i < most ? i : most; }

template <class T>
struct Operand {
  const T* at;
  int64_t pitch, count;  // count: rows of the left operand, or columns of the right operand
};

// A tile of the result. The tile begins at element `at`, and is the product of the rows of a and the columns of b.
template <class T>
struct Tile {
  int64_t at, depth;
  Operand<T> a, b;
};

// kRows x kColumns elements of 16 bits. Chunks of 8 elements are permuted, so that the rows of an 8 x 8 matrix are in different
// banks.
template <class T, int kRows, int kColumns>
struct SharedTile {
  static constexpr int kChunks = kColumns / 8;

  T* at;

  __device__ T* chunk(int row, int chunk) const {
    const int turned = kChunks == 4 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
    return at + row * kColumns + turned * 8;
  }

  // Copies `rows` x `columns` elements, asynchronously if `wide`. The rest of the tile becomes zeros.
  __device__ void copy(const T* from, int64_t pitch, int64_t rows, int64_t columns, bool wide) const {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kChunks; i += kGroupedThreads) {
      const int row = i / kChunks, position = i % kChunks;
      const int64_t left = row < rows ? columns - position * 8 : 0;
      const int count = static_cast<int>(limited(left, 8));
      const T* const source = count > 0 ? from + row * pitch + position * 8 : from;
      T* const to = chunk(row, position);
      if (wide) {
        copy_to_shared(to, source, count * 2);
      } else {
        for (int j = 0; j < 8; ++j) to[j] = j < count ? source[j] : T(0.0f);
      }
    }
  }
};

// One tile of a product of 16-bit floats: a [kRows, depth] times b [depth, kColumns]. With kTurnedA, a is column-major. With
// kTurnedB, b is column-major. Each stage has kDepth terms. The next stages are copied while a stage is multiplied.
template <class T, int kTileRows, int kWarpRows, bool kTurnedA, bool kTurnedB>
struct TileProduct {
  static constexpr int kRows = kTileRows, kColumns = 128, kDepth = 32, kWarps = kGroupedThreads / 32;
  static constexpr int kStages = kRows == 16 ? 5 : kRows == 64 ? 4 : 3;  // stages that fit into 48 KiB
  static constexpr int kWarpsDown = kRows / kWarpRows, kWarpColumns = kColumns / (kWarps / kWarpsDown);
  static constexpr int kStage = (kRows + kColumns) * kDepth;

  using A = SharedTile<T, kTurnedA ? kDepth : kRows, kTurnedA ? kRows : kDepth>;
  using B = SharedTile<T, kTurnedB ? kColumns : kDepth, kTurnedB ? kDepth : kColumns>;

  T* shared;
  bool wide;  // 16-byte reads are possible
  float sums[kWarpRows / 16][kWarpColumns / 8][4];

  __device__ TileProduct(T* shared, bool wide) : shared(shared), wide(wide) {}

  // Starts to copy stage `step` of a tile, if the tile has that stage.
  __device__ void copy(const Tile<T>& tile, int64_t step) const {
    const auto& [at_a, pitch_a, count_a] = tile.a;
    const auto& [at_b, pitch_b, count_b] = tile.b;
    const int64_t k = step * kDepth, left = tile.depth - k;
    T* const stage = shared + step % kStages * kStage;
    if (left > 0) {
      A{stage}.copy(at_a + (kTurnedA ? k * pitch_a : k), pitch_a, kTurnedA ? left : count_a, kTurnedA ? count_a : left, wide);
      B{stage + kRows * kDepth}.copy(at_b + (kTurnedB ? k : k * pitch_b), pitch_b, kTurnedB ? count_b : left,
                                     kTurnedB ? left : count_b, wide);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Starts to copy the first stages of a tile. All threads must have finished reading the previous tile.
  __device__ void start(const Tile<T>& tile) const {
    for (int i = 0; i < kStages - 1; ++i) copy(tile, i);
  }

  __device__ void multiply(const Tile<T>& tile) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (auto& each : row) each[0] = each[1] = each[2] = each[3] = 0;
    }
    const int64_t steps = (tile.depth + kDepth - 1) / kDepth;
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      copy(tile, step + kStages - 1);
      T* const stage = shared + step % kStages * kStage;
      add({stage}, {stage + kRows * kDepth});
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }

  __device__ int first_row() const { return threadIdx.x / 32 % kWarpsDown * kWarpRows; }
  __device__ int first_column() const { return threadIdx.x / 32 / kWarpsDown * kWarpColumns; }

  __device__ void add(const A& a, const B& b) {
    const int lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint4 of_a[kWarpRows / 16], of_b[kWarpColumns / 16];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        const int m = first_row() + i * 16;
        of_a[i] = load_matrices<kTurnedA>(kTurnedA ? a.chunk(k + matrix / 2 * 8 + in_matrix, m / 8 + matrix % 2)
                                                   : a.chunk(m + matrix % 2 * 8 + in_matrix, k / 8 + matrix / 2));
      }
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        const int n = first_column() + j * 16;
        of_b[j] = load_matrices<!kTurnedB>(kTurnedB ? b.chunk(n + matrix / 2 * 8 + in_matrix, k / 8 + matrix % 2)
                                                    : b.chunk(k + matrix % 2 * 8 + in_matrix, n / 8 + matrix / 2));
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          float (&to)[4] = sums[i][j];
          const uint4& b = of_b[j / 2];
          multiply_add(to[0], to[1], to[2], to[3], of_a[i], j % 2 ? b.z : b.x, j % 2 ? b.w : b.y, T());
        }
      }
    }
  }

  // Stores the part of the tile that is inside the result.
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

#endif

}  // namespace hw
