// Matmuls with few rows, x[rows, depth] w[depth, columns]. Reading the weights takes most of the time. A cluster computes
// kProductColumns columns, and each warp sums a part of the depth. The kernel adds the sums of the warps in a fixed order, so
// results are deterministic. One kernel may compute several matmuls with the same x. Each warp then works on one matmul.
#pragma once
#include "hostweave/cluster.h"
#include "hostweave/index.h"
#include "hostweave/kernel.h"
#include "hostweave/products.h"
#include "hostweave/tensor_core.h"

namespace hw {

#ifdef __CUDACC__

// True if all operands allow 16-byte reads.
template <class T, int kCount>
__device__ bool is_wide(const FewRows<T, kCount>& p) {
  constexpr int kStep = sizeof(T) == 1 ? 16 : 8;
  bool is = aligned(p.x) && (p.depth | p.x_pitch | p.pitch) % kStep == 0 && p.columns % 8 == 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) is = is && aligned(p.weights[i]);
  return is;
}

// Streaming load of 16 bytes. An L2 prefetch qualifier would make the kernel slower.
__device__ inline uint4 stream_in(const void* from, bool exists) {
  uint4 v{0, 0, 0, 0};
  if (exists) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  }
  return v;
}

// Prefetches to L2. L2 is coherent with global memory, so a prefetch is safe even if another kernel writes to the address later.
__device__ inline void prefetch(const void* from, bool exists) {
  if (exists) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ inline unsigned word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// On a tensor core, adds the product of 16 columns of weights and 8 rows of x, over 16 terms.
template <class T>
__device__ void multiply_add(float (&sums)[4], const uint4& w, unsigned x0, unsigned x1, T) {
  multiply_add(sums[0], sums[1], sums[2], sums[3], w, x0, x1, T());
}

// Terms 4 i to 4 i + 3 of a 16-byte read, as 16-bit floats.
template <class T>
__device__ uint2 four_terms(const uint4& v, int i, T) {
  static_assert(sizeof(T) == 2);
  return {word(v, 2 * i), word(v, 2 * i + 1)};
}

#ifdef __CUDA_FP8_H__  // Kernels without 8-bit floats omit cuda_fp8.h, because cuda_fp8.h compiles slowly.

// 8-bit floats are multiplied as f16. The conversion to f16 is exact.
__device__ inline void multiply_add(float (&sums)[4], const uint4& w, unsigned x0, unsigned x1, f8e4m3) {
  multiply_add(sums, w, x0, x1, f16());
}

__device__ inline uint2 four_terms(const uint4& v, int i, f8e4m3) {
  const auto wide = [](unsigned two) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return static_cast<unsigned>(pair.x) | static_cast<unsigned>(pair.y) << 16;
  };
  return {wide(word(v, i) & 0xffff), wide(word(v, i) >> 16)};
}

#endif

// Sums of a warp or of a thread block, padded against bank conflicts.
using ProductSums = float[kFewRows][kProductColumns + 1];

template <class Sums>
__device__ void store_group(Sums& sums, ProductSums& into, int group, int rows) {
#pragma unroll
  for (int i = 0; i < Sums::kSums; ++i) {
    const int row = sums.row_of(i) - group * kFewRows;
    if (0 <= row && row < kFewRows && sums.row_of(i) < rows) into[row][sums.column_of(i)] = sums.sum(i);
  }
}

// Sums of a warp over a block of columns, kDepth terms per step. In a step, a thread reads the same terms of both operands,
// 16 bytes at a time.
template <class T, bool kTransposed, int kGroups = 1>
struct WideSums {
  static constexpr int kTerms = 16 / sizeof(T), kDepth = 4 * kTerms, kSums = 16 * kGroups;
  static_assert(sizeof(T) == 2 || kTransposed);

  float sums[kGroups][4][4] = {};
  const int row = threadIdx.x % 32 / 4, column = row * 8, term = threadIdx.x % 4 * kTerms;

  struct Step {
    uint4 x[kGroups], w[8];
  };

  template <int kCount, class Use>
  __device__ void each(const FewRows<T, kCount>& p, const T* weights, int64_t k, int64_t j, const Use& use) const {
    k += term, j += column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      use(i, kTransposed ? weights + (j + i) * p.pitch + k : weights + (k + i) * p.pitch + j, k < p.depth && j < p.columns);
    }
  }
  template <int kCount>
  __device__ Step load(const FewRows<T, kCount>& p, const T* weights, int64_t k, int64_t j) const {
    Step step;
    each(p, weights, k, j, [&](int i, const T* from, bool exists) { step.w[i] = stream_in(from, exists); });
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int64_t at = row + group * kFewRows;
      step.x[group] = uint4{0, 0, 0, 0};
      if (at < p.rows && k + term < p.depth) step.x[group] = *reinterpret_cast<const uint4*>(p.x + at * p.x_pitch + k + term);
    }
    return step;
  }
  __device__ void add(const Step& step) {
#pragma unroll
    for (int i = 0; i < kTerms / 4; ++i) {
      uint2 x[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) x[group] = four_terms(step.x[group], i, T());
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const uint4 w = weights_of(step.w, i, pair);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) multiply_add(sums[group][pair], w, x[group].x, x[group].y, T());
      }
    }
  }
  // This thread's part of a tensor core operand: two columns, and terms 4 i to 4 i + 3.
  __device__ static uint4 weights_of(const uint4 (&w)[8], int i, int pair) {
    if constexpr (kTransposed) {
      const uint2 even = four_terms(w[2 * pair], i, T()), odd = four_terms(w[2 * pair + 1], i, T());
      return {even.x, odd.x, even.y, odd.y};
    } else {
      const uint4* const rows = w + 4 * i;
      const unsigned a = word(rows[0], pair), b = word(rows[1], pair), c = word(rows[2], pair), d = word(rows[3], pair);
      return {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
    }
  }
  __device__ float& sum(int i) { return sums[i / 16][i % 16 / 4][i % 4]; }
  __device__ int row_of(int i) const { return i / 16 * kFewRows + threadIdx.x % 4 * 2 + i % 2; }
  __device__ int column_of(int i) const { return column + i % 16 / 4 * 2 + i % 4 / 2; }
  __device__ void store(ProductSums& into, int group, int rows) { store_group(*this, into, group, rows); }
};

// Sums of f32 products. Tensor cores would round the operands, so this code does not use tensor cores. Two threads share 4
// columns. Each of the two sums half of the terms.
template <bool kTransposed>
struct WideSums<float, kTransposed, 1> {
  static constexpr int kDepth = 16;

  float sums[kFewRows][4] = {};
  const int column = threadIdx.x % 16 * 4, term = threadIdx.x % 32 / 16 * 8;

  struct Step {
    uint4 w[8];
    const float* x;
    int64_t x_pitch;
    int rows;
  };

  template <int kCount, class Use>
  __device__ void each(const FewRows<float, kCount>& p, const float* weights, int64_t k, int64_t j, const Use& use) const {
    k += term, j += column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const from = kTransposed ? weights + (j + i / 2) * p.pitch + k + i % 2 * 4 : weights + (k + i) * p.pitch + j;
      use(i, from, k < p.depth && j < p.columns);
    }
  }
  template <int kCount>
  __device__ Step load(const FewRows<float, kCount>& p, const float* weights, int64_t k, int64_t j) const {
    Step step{{}, p.x + k + term, p.x_pitch, k + term < p.depth ? static_cast<int>(p.rows) : 0};
    each(p, weights, k, j, [&](int i, const float* from, bool exists) { step.w[i] = stream_in(from, exists); });
    return step;
  }
  __device__ void add(const Step& step) {
#pragma unroll
    for (int row = 0; row < kFewRows; ++row) {
      if (row >= step.rows) break;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int term = i / 4, j = i % 4;
        const uint4 x = *reinterpret_cast<const uint4*>(step.x + row * step.x_pitch + term / 4 * 4);
        const unsigned one = kTransposed ? word(step.w[2 * j + term / 4], term % 4) : word(step.w[term], j);
        sums[row][j] += __uint_as_float(word(x, term % 4)) * __uint_as_float(one);
      }
    }
  }
  __device__ void store(ProductSums& into, int, int rows) const {
#pragma unroll
    for (int row = 0; row < kFewRows; ++row) {
      if (row >= rows) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = sums[row][j] + __shfl_xor_sync(~0u, sums[row][j], 16);
        if (threadIdx.x % 32 < 16) into[row][column + j] = sum;
      }
    }
  }
};

// Sums for operands that do not allow 16-byte reads. Reads one element at a time.
template <class T, bool kTransposed, int kGroups = 1>
struct NarrowSums {
  static constexpr int kDepth = 16, kSums = 2 * kFewRows * kGroups;

  float sums[kFewRows * kGroups][2] = {};
  const int column = threadIdx.x % 32;  // this thread owns columns `column` and column + 32

  template <int kCount>
  __device__ void add(const FewRows<T, kCount>& p, const T* weights, int64_t first, int64_t j) {
    for (int64_t k = first; k < first + kDepth && k < p.depth; ++k) {
      float w[2] = {};
      for (int i = 0; i < 2; ++i) {
        const int64_t at = j + column + 32 * i;
        if (at < p.columns) w[i] = static_cast<float>(weights[kTransposed ? at * p.pitch + k : k * p.pitch + at]);
      }
#pragma unroll
      for (int row = 0; row < kFewRows * kGroups; ++row) {
        if (row >= p.rows) break;
        const auto x = static_cast<float>(p.x[row * p.x_pitch + k]);
        sums[row][0] += x * w[0], sums[row][1] += x * w[1];
      }
    }
  }
  __device__ float& sum(int i) { return sums[i / 2][i % 2]; }
  __device__ int row_of(int i) const { return i / 2; }
  __device__ int column_of(int i) const { return column + i % 2 * 32; }
  __device__ void store(ProductSums& into, int group, int rows) { store_group(*this, into, group, rows); }
};

__device__ inline int64_t up_to_last(int64_t i, int64_t count) { return i < count ? i : count - 1; }

// Multiplies the sums of a step by the scales of its block of 128 terms, and adds the products to the total. `first` is the first
// column of the sums.
template <class Sums, class T, int kCount>
__device__ void add_block(Sums& total, Sums& of_block, const FewRows<T, kCount>& p, const ProductScales& scales, int64_t k,
                          int64_t first) {
#pragma unroll
  for (int i = 0; i < Sums::kSums; ++i) {
    const int64_t row = up_to_last(total.row_of(i), p.rows), column = up_to_last(first + total.column_of(i), p.columns);
    const float scale = scales.x.of(row, k) * scales.weights.of(column, k);
    total.sum(i) += scale * of_block.sum(i);
  }
}

// A warp's share of the depth: groups of terms that start at begin, begin + step, ...
struct WarpPart {
  int64_t begin, step;
};

template <int kCount, int kWarps>
__device__ WarpPart warp_part(int terms) {
  const int warp = threadIdx.x / 32, each = (kWarps - 1 - warp % kCount) / kCount + 1;  // warps per matmul
  return {int64_t{terms} * (each * Cluster::rank() + warp / kCount), int64_t{terms} * each * Cluster::size()};
}

// Calls end(row, column, sums) once for each row and column; `sums` has one sum per matmul. May prefetch weights before
// hw::griddep_wait(). With `kOfBlocks`, multiplies the sums of each 128 terms by their scales.
template <bool kTransposed, int kThreads = kProductThreads, bool kOfBlocks = false, int kGroups = 1, class T, int kCount,
          class End>
__device__ void few_rows(const FewRows<T, kCount>& p, const End& end, const ProductScales& scales = {}) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kCount <= kWarps);
  __shared__ ProductSums of_warps[kWarps];
  __shared__ ProductSums of_blocks[kCount][kGroups];
  const int rank = Cluster::rank(), blocks = Cluster::size(), warp = threadIdx.x / 32;
  const int64_t first = int64_t{blockIdx.x} / blocks * kProductColumns;
  const T* weights = p.weights[0];
#pragma unroll
  for (int product = 1; product < kCount; ++product) weights = warp % kCount == product ? p.weights[product] : weights;
  const int elements = static_cast<int>(p.rows) * kProductColumns;
  const auto add_warps = [&](auto& sums) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group > 0) __syncthreads();
      sums.store(of_warps[warp], group, static_cast<int>(p.rows));
      __syncthreads();
      const int of_group = elements - group * kFewRows * kProductColumns;
      for (int i = threadIdx.x; i < of_group && i < kFewRows * kProductColumns; i += kThreads) {
        const int row = i / kProductColumns, column = i % kProductColumns;
#pragma unroll
        for (int product = 0; product < kCount; ++product) {
          float sum = 0;
#pragma unroll
          for (int warp = product; warp < kWarps; warp += kCount) sum += of_warps[warp][row][column];
          of_blocks[product][group][row][column] = sum;
        }
      }
    }
  };
  griddep_launch();
  if (is_wide(p)) {
    WideSums<T, kTransposed, kGroups> sums;
    const auto [begin, step] = warp_part<kCount, kWarps>(sums.kDepth);
    sums.each(p, weights, begin, first, [](int, const T* from, bool exists) { prefetch(from, exists); });
    griddep_wait();
    auto next = sums.load(p, weights, begin, first);
    for (int64_t k = begin; k < p.depth; k += step) {
      const auto here = next;
      next = sums.load(p, weights, k + step, first);
      if constexpr (kOfBlocks) {
        WideSums<T, kTransposed, kGroups> of_block;
        of_block.add(here);
        add_block(sums, of_block, p, scales, k, first);
      } else {
        sums.add(here);
      }
    }
    add_warps(sums);
  } else {
    griddep_wait();
    NarrowSums<T, kTransposed, kGroups> sums;
    const auto [begin, step] = warp_part<kCount, kWarps>(sums.kDepth);
    for (int64_t k = begin; k < p.depth; k += step) {
      if constexpr (kOfBlocks) {
        NarrowSums<T, kTransposed, kGroups> of_block;
        of_block.add(p, weights, k, first);
        add_block(sums, of_block, p, scales, k, first);
      } else {
        sums.add(p, weights, k, first);
      }
    }
    add_warps(sums);
  }
  Cluster::meet();
  for (int i = rank * kThreads + threadIdx.x; i < elements; i += kThreads * blocks) {
    const int row = i / kProductColumns, column = i % kProductColumns;
    if (first + column >= p.columns) continue;
    float sums[kCount] = {};
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
      for (int product = 0; product < kCount; ++product)
        sums[product] += Cluster::of(block, of_blocks[product][row / kFewRows][row % kFewRows][column]);
    }
    end(int64_t{row}, first + column, sums);
  }
  if (blocks > 1) Cluster::meet();  // Shared memory must exist until all blocks have read it.
}

#else

// Implementation for the CPU device, which accumulates in f64.
template <bool kTransposed, class T, int kCount, class End>
void few_rows(const FewRows<T, kCount>& p, const End& end) {
  for (int64_t first = 0; first < p.columns; first += kProductColumns) {
    const int64_t columns = p.columns - first < kProductColumns ? p.columns - first : kProductColumns;
    double totals[kCount][kFewRows][kProductColumns] = {};
    for (int64_t k = 0; k < p.depth; ++k) {
      for (int product = 0; product < kCount; ++product) {
        double w[kProductColumns] = {};
        for (int64_t j = 0; j < columns; ++j) {
          w[j] = static_cast<float>(p.weights[product][kTransposed ? (first + j) * p.pitch + k : k * p.pitch + first + j]);
        }
        for (int64_t row = 0; row < p.rows; ++row) {
          const double x = static_cast<float>(p.x[row * p.x_pitch + k]);
          for (int64_t j = 0; j < kProductColumns; ++j) totals[product][row][j] += x * w[j];
        }
      }
    }
    for (int64_t row = 0; row < p.rows; ++row) {
      for (int64_t j = 0; j < columns; ++j) {
        float sums[kCount];
        for (int product = 0; product < kCount; ++product) sums[product] = static_cast<float>(totals[product][row][j]);
        end(row, first + j, sums);
      }
    }
  }
}

#endif

}  // namespace hw
