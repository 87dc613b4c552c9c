// Tiles of attention operands, and their products in f32. Products<T> multiplies the tiles, and defines which elements of the
// scores and results each thread owns. On GPUs, products of 16-bit operands use tensor cores. On the CPU device a block is one
// thread.
#pragma once
#include "hostweave/attention_kernel.h"
#include "hostweave/kernel.h"
#include "hostweave/tensor_core.h"

namespace hw {
namespace {

constexpr int kTileSide = kAttentionTile;

// Rows of one head of an operand.
template <class T>
struct Tile {
  const T* base;
  int64_t pitch, rows, size;
  bool is_aligned;  // allows 16-byte reads at multiples of 8 elements

  HW_DEVICE bool has(int64_t row, int64_t column) const { return row < rows && column < size; }
  HW_DEVICE const T* at(int64_t row, int64_t column) const { return base + row * pitch + column; }

  // Eight elements of a row from column `first` on. Elements past the end of the tile are zero.
  HW_DEVICE Values<T, 8> eight(int64_t row, int64_t first) const {
    Values<T, 8> result = filled<8>(static_cast<T>(0.f));
    if (is_aligned) {
      if (has(row, first)) result = load<8>(at(row, first));
      return result;
    }
    for (int i = 0; i < 8; ++i) {
      if (has(row, first + i)) result[i] = *at(row, first + i);
    }
    return result;
  }
};

template <class Memory>
__device__ int64_t at(const HeadsAt<Memory>& x, int64_t batch, int64_t head) {
  return batch * x.batch_stride + head * x.head_stride;
}

// Tile of a head: at most kAttentionTile rows, from row `first` on, before row `end`.
template <class T, class Memory>
__device__ Tile<T> tile(const HeadsAt<Memory>& x, int64_t size, int64_t batch, int64_t head, int64_t first, int64_t end) {
  const T* const base = static_cast<const T*>(x.base) + at(x, batch, head) + first * x.row_stride;
  const bool is_aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0 && x.row_stride * sizeof(T) % 16 == 0 && size % 8 == 0;
  return {base, x.row_stride, Sight::least(kTileSide, end - first), size, is_aligned};
}

// Elements that one thread owns in kWidth columns.
template <class Products, int kWidth>
using Part = float[Products::kRows][kWidth / 16 * Products::kOf16];

template <int kColumns, int kRows>
__device__ void clear(float (&x)[kRows][kColumns]) {
  HW_UNROLL
  for (auto& row : x) {
    HW_UNROLL
    for (float& each : row) each = 0;
  }
}

#ifdef __CUDACC__

HW_DEVICE void wait_for_threads() { __syncthreads(); }

// Sets sums[i] to the dot product of row i of a and row i of b.
template <class T>
__device__ void add_products(float (&sums)[kTileSide], const Tile<T>& a, const Tile<T>& b) {
  constexpr int kLanes = kAttentionThreads / kTileSide;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum = 0;
#pragma unroll 2
  for (int64_t column = lane * 8; column < a.size; column += kLanes * 8) {
    const auto left = a.eight(row, column), right = b.eight(row, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += static_cast<float>(left[i]) * static_cast<float>(right[i]);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (lane == 0) sums[row] = sum;
}

// Products of 16-bit operands in shared memory, by mma.m16n8k16. A warp computes 16 rows and 8 of every 16 columns.
template <class T>
class Products {
 public:
  static constexpr int kRows = 2, kOf16 = 2;
  using Scores = Part<Products, kTileSide>;

  // Index in the tile of a thread's i-th row, or of its j-th column. The index may be past the end of the tile.
  __device__ static int row(int i) { return strip() + threadIdx.x % 32 / 4 + 8 * i; }
  __device__ static int column(int j) { return 16 * (j / 2) + half() + threadIdx.x % 4 * 2 + j % 2; }
  __device__ static constexpr int rows(int64_t) { return kRows; }
  template <int kWidth>
  __device__ static constexpr int columns(int64_t) {
    return kWidth / 16 * kOf16;
  }

  // Sets the scores to a times the transpose of b.
  __device__ void multiply(Scores& scores, const Tile<T>& a, const Tile<T>& b) {
    clear(scores);
    for (int64_t first = 0; first < a.size; first += kTileSide) {
      __syncthreads();
      copy(a_, a, first), copy(b_, b, first);
      wait_for_copies();
#pragma unroll
      for (int k = 0; k < kTileSide; k += 16) {
        const uint4 left = load_matrices<false>(&a_[strip() + lane() % 16][k + lane() / 16 * 8]);
#pragma unroll
        for (int j = 0; j < kOfSide; j += 4) {
          add_products(scores, j, left,
                       load_matrices<false>(&b_[8 * j + lane() / 16 * 16 + half() + lane() % 8][k + lane() / 8 % 2 * 8]));
        }
      }
    }
  }

  // Copies the scores to shared memory, as weights for add_weighted.
  __device__ void keep(const Scores& scores) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kOfSide; j += 2) {
        *reinterpret_cast<Values<T, 2>*>(&weights_[row(i)][column(j)]) = {static_cast<T>(scores[i][j]),
                                                                          static_cast<T>(scores[i][j + 1])};
      }
    }
  }

  template <int kWidth>
  __device__ void add_weighted(Part<Products, kWidth>& sums, const Tile<T>& x) {
#pragma unroll
    for (int first = 0; first < kWidth; first += kTileSide) {
      if (first >= x.size) continue;
      __syncthreads();
      copy(b_, x, first);
      wait_for_copies();
#pragma unroll
      for (int k = 0; k < kTileSide; k += 16) {
        const uint4 left = load_matrices<false>(&weights_[strip() + lane() % 16][k + lane() / 16 * 8]);
#pragma unroll
        for (int j = 0; j < kOfSide; j += 4) {
          add_products(sums, first / 16 * kOf16 + j, left,
                       load_matrices<true>(&b_[k + lane() % 16][8 * j + lane() / 16 * 16 + half()]));
        }
      }
    }
  }

  // Combines each row's values over all columns of the tile. A barrier must separate two calls of `combine`.
  template <class Combine>
  __device__ void combine(float (&x)[kRows], Combine combined) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for (int lanes = 2; lanes > 0; lanes /= 2) x[i] = combined(x[i], __shfl_xor_sync(0xffffffff, x[i], lanes));
      if (lane() % 4 == 0) halves_[half() / 8][row(i)] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = combined(halves_[0][row(i)], halves_[1][row(i)]);
  }

  // Scratch memory for a tile of floats. The next product overwrites this memory.
  __device__ auto floats() { return reinterpret_cast<float (*)[kTileSide + 1]>(a_); }

 private:
  using Matrix = T[kTileSide][kTileSide + 8];             // padded against bank conflicts
  static constexpr int kOfSide = kTileSide / 16 * kOf16;  // columns of the scores

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int strip() { return threadIdx.x / 32 % 4 * 16; }
  __device__ static int half() { return threadIdx.x / 128 * 8; }

  // Copies kTileSide columns of a tile, from column `first` on, padded with zeros. The copy is visible after wait_for_copies.
  __device__ static void copy(Matrix& to, const Tile<T>& x, int64_t first) {
#pragma unroll
    for (int i = threadIdx.x; i < kTileSide * kTileSide / 8; i += kAttentionThreads) {
      const int row = i / 8, column = i % 8 * 8;
      T* const target = &to[row][column];
      if (!x.is_aligned) {
        *reinterpret_cast<Values<T, 8>*>(target) = x.eight(row, first + column);
        continue;
      }
      const bool is_there = x.has(row, first + column);
      copy_to_shared(target, is_there ? x.at(row, first + column) : x.base, is_there ? 16 : 0);
    }
  }
  __device__ static void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }

  // Adds the products of a and two matrices, the halves of b, to columns j to j + 3.
  template <int kColumns>
  __device__ static void add_products(float (&sums)[kRows][kColumns], int j, const uint4& a, const uint4& b) {
    multiply_add(sums[0][j], sums[0][j + 1], sums[1][j], sums[1][j + 1], a, b.x, b.y, T());
    multiply_add(sums[0][j + 2], sums[0][j + 3], sums[1][j + 2], sums[1][j + 3], a, b.z, b.w, T());
  }

  alignas(16) Matrix a_, b_, weights_;
  float halves_[2][kTileSide];
};

// Products of f32 operands, without tensor cores. A thread owns rows and columns with stride 16.
template <>
class Products<float> {
 public:
  static constexpr int kRows = kTileSide / 16, kOf16 = 1;
  using Scores = Part<Products, kTileSide>;

  __device__ static int row(int i) { return threadIdx.x / 16 + 16 * i; }
  __device__ static int column(int j) { return threadIdx.x % 16 + 16 * j; }
  __device__ static constexpr int rows(int64_t) { return kRows; }
  template <int kWidth>
  __device__ static constexpr int columns(int64_t) {
    return kWidth / 16 * kOf16;
  }

  __device__ void multiply(Scores& scores, const Tile<float>& a, const Tile<float>& b) {
    clear(scores);
    for (int64_t first = 0; first < a.size; first += kDepth) {
      __syncthreads();
      for (int i = threadIdx.x; i < kTileSide * kDepth; i += kAttentionThreads) {
        const int row = i / kDepth, d = i % kDepth;
        a_[d][row] = a.has(row, first + d) ? *a.at(row, first + d) : 0;
        b_[d][row] = b.has(row, first + d) ? *b.at(row, first + d) : 0;
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < kDepth; ++d) {
        float left[kRows], right[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) left[i] = a_[d][row(i)], right[i] = b_[d][column(i)];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kRows; ++j) scores[i][j] += left[i] * right[j];
        }
      }
    }
  }

  __device__ void keep(const Scores& scores) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) weights_[row(i)][column(j)] = scores[i][j];
    }
  }

  template <int kWidth>
  __device__ void add_weighted(Part<Products, kWidth>& sums, const Tile<float>& x) {
    __syncthreads();
    for (int term = 0; term < x.rows; ++term) {
      float weights[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) weights[i] = weights_[row(i)][term];
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) {
        const float value = column(j) < x.size ? *x.at(term, column(j)) : 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) sums[i][j] += weights[i] * value;
      }
    }
  }

  template <class Combine>
  __device__ void combine(float (&x)[kRows], Combine combined) {
#pragma unroll
    for (float& each : x) {
      for (int lanes = 8; lanes > 0; lanes /= 2) each = combined(each, __shfl_xor_sync(0xffffffff, each, lanes));
    }
  }

  __device__ auto floats() { return weights_; }

 private:
  static constexpr int kDepth = 32;                            // elements of a head per step
  float a_[kDepth][kTileSide + 1], b_[kDepth][kTileSide + 1];  // transposed, padded against bank conflicts
  float weights_[kTileSide][kTileSide + 1];
};

#else

HW_DEVICE void wait_for_threads() {}

template <class T>
void add_products(float (&sums)[kTileSide], const Tile<T>& a, const Tile<T>& b) {
  for (int64_t row = 0; row < a.rows; ++row) {
    sums[row] = 0;
    for (int64_t i = 0; i < a.size; ++i) sums[row] += static_cast<float>(*a.at(row, i)) * static_cast<float>(*b.at(row, i));
  }
}

// Products on the CPU device. The thread owns all rows and columns of a tile. Operands that BLAS cannot read are
// first copied as f32.
template <class T>
class Products {
 public:
  static constexpr int kRows = kTileSide, kOf16 = 16;
  using Scores = Part<Products, kTileSide>;

  static int row(int i) { return i; }
  static int column(int j) { return j; }
  static int rows(int64_t count) { return static_cast<int>(Sight::least(count, kRows)); }
  template <int kWidth>
  static int columns(int64_t count) {
    return static_cast<int>(Sight::least(count, kWidth));
  }

  void multiply(Scores& scores, const Tile<T>& a, const Tile<T>& b) {
    const Tile<float> left = floats_of(a, a_), right = floats_of(b, b_);
    hw_cpu_multiply(left.base, left.pitch, right.base, right.pitch, true, scores[0], kTileSide, a.rows, b.rows, a.size, 0);
    rows_ = a.rows;
  }
  void keep(const Scores& scores) { weights_ = scores; }

  template <int kWidth>
  void add_weighted(Part<Products, kWidth>& sums, const Tile<T>& x) {
    const Tile<float> right = floats_of(x, b_);
    hw_cpu_multiply(weights_[0], kTileSide, right.base, right.pitch, false, sums[0], kWidth, rows_, x.size, x.rows, 1);
  }

  template <class Combine>
  void combine(float (&)[kRows], Combine) {}

  auto floats() { return scratch_; }

 private:
  using Floats = float[kTileSide * kMostHead];

  static Tile<float> floats_of(const Tile<T>& x, Floats& floats) {
    if constexpr (__is_same(T, float)) {
      if (x.pitch >= x.size) return x;  // BLAS can read the tile directly
    }
    for (int64_t row = 0; row < x.rows; ++row) {
      for (int64_t i = 0; i < x.size; ++i) floats[row * x.size + i] = static_cast<float>(*x.at(row, i));
    }
    return {floats, x.size, x.rows, x.size, false};
  }

  Floats a_, b_;
  float scratch_[kTileSide][kTileSide];
  const float (*weights_)[kTileSide];
  int64_t rows_;
};

#endif

}  // namespace
}  // namespace hw
