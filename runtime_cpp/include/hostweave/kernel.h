// What kernels are written with, for CUDA and for the CPU device. There one thread in one block runs the whole kernel, so
// every loop below covers its whole range and a reduction over the block has nothing left to do.
#pragma once
#include <cmath>
#include <cstdint>

#include "hostweave/types.h"

#ifdef __CUDACC__
#define HW_DEVICE __device__ inline
#else
#define HW_DEVICE inline
#define __device__  // words of CUDA that kernels written by hand may have
#define __forceinline__ inline
#define __launch_bounds__(...)
#endif

namespace hw {

struct Walk {  // for (int64_t i : walk)
  int64_t begin_, end_, step_;

  struct Iterator {
    int64_t i, step;
    HW_DEVICE int64_t operator*() const { return i; }
    HW_DEVICE void operator++() { i += step; }
    HW_DEVICE bool operator!=(const Iterator& end) const { return i < end.i; }
  };
  HW_DEVICE Iterator begin() const { return {begin_, step_}; }
  HW_DEVICE Iterator end() const { return {end_, step_}; }
};

// A column of a tile of 32, which one lane of every warp walks. Lanes past the last column walk it again, and store nothing.
struct Lane {
  int64_t index;
  bool stores_;

  HW_DEVICE operator int64_t() const { return index; }
  // Whether this thread stores what the warps computed together.
  HW_DEVICE bool stores() const { return stores_; }
};

struct Lanes {  // for (Lane j : lanes)
  int64_t begin_, end_, step_;
  int lane_;
  bool first_warp_;

  struct Iterator {
    int64_t tile;
    const Lanes& lanes;
    HW_DEVICE Lane operator*() const {
      const int64_t column = tile + lanes.lane_;
      return column < lanes.end_ ? Lane{column, lanes.first_warp_} : Lane{lanes.end_ - 1, false};
    }
    HW_DEVICE void operator++() { tile += lanes.step_; }
    HW_DEVICE bool operator!=(const Iterator& end) const { return tile < end.tile; }
  };
  HW_DEVICE Iterator begin() const { return {begin_, *this}; }
  HW_DEVICE Iterator end() const { return {end_, *this}; }
};

template <class T>
struct Indexed {  // an element and where it is
  T value;
  int64_t index;
};

#ifdef __CUDACC__

// 0..n shared among the threads of the grid, among its blocks, among the threads of a block, among its warps. Neighbouring
// threads take neighbouring elements.
HW_DEVICE Walk over_grid(int64_t n) {
  return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x, n, int64_t{gridDim.x} * blockDim.x};
}
HW_DEVICE Walk over_blocks(int64_t n) { return {blockIdx.x, n, gridDim.x}; }
HW_DEVICE Walk over_threads(int64_t n) { return {threadIdx.x, n, blockDim.x}; }

HW_DEVICE Walk over_warps(int64_t n) { return {threadIdx.x / 32, n, blockDim.x / 32}; }
// 0..n shared among the lanes of the warps of all blocks; each warp of a block has the same ones.
HW_DEVICE Lanes over_lanes(int64_t n) {
  return {int64_t{blockIdx.x} * 32, n, int64_t{gridDim.x} * 32, static_cast<int>(threadIdx.x % 32), threadIdx.x < 32};
}

HW_DEVICE bool first_thread() { return threadIdx.x == 0; }

template <class T>
__device__ T value_of(T value, int distance) {
  return __shfl_down_sync(~0u, value, distance);
}
template <class T>
__device__ Indexed<T> value_of(Indexed<T> one, int distance) {
  return {__shfl_down_sync(~0u, one.value, distance), __shfl_down_sync(~0u, one.index, distance)};
}

// Joins one value of every thread of a block, which has whole warps. Every thread gets the result.
template <class T, class Join>
__device__ T reduce_block(T value, Join join) {
  __shared__ T partial[32];
  for (int distance = 16; distance > 0; distance /= 2) value = join(value, value_of(value, distance));
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < warps; ++warp) value = join(value, partial[warp]);
    partial[0] = value;
  }
  __syncthreads();
  value = partial[0];
  __syncthreads();  // the next reduction may overwrite
  return value;
}

// Joins the values that the same lane of every warp of a block has. Every warp gets the result.
template <class T, class Join>
__device__ T reduce_warps(T value, Join join) {
  __shared__ T partial[32][32];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  partial[warp][lane] = value;
  __syncthreads();
  value = partial[0][lane];
  for (int other = 1; other < warps; ++other) value = join(value, partial[other][lane]);
  __syncthreads();  // the next reduction may overwrite
  return value;
}

#else

HW_DEVICE Walk over_grid(int64_t n) { return {0, n, 1}; }
HW_DEVICE Walk over_blocks(int64_t n) { return {0, n, 1}; }
HW_DEVICE Walk over_threads(int64_t n) { return {0, n, 1}; }
HW_DEVICE Walk over_warps(int64_t n) { return {0, n, 1}; }
HW_DEVICE Lanes over_lanes(int64_t n) { return {0, n, 1, 0, true}; }

HW_DEVICE bool first_thread() { return true; }

template <class T, class Join>
T reduce_block(T value, Join) {
  return value;
}

template <class T, class Join>
T reduce_warps(T value, Join) {
  return value;
}

#endif

struct Add {
  template <class T>
  HW_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

struct Multiply {
  template <class T>
  HW_DEVICE T operator()(T a, T b) const {
    return a * b;
  }
};

struct Maximum {  // a NaN on either side stays
  template <class T>
  HW_DEVICE T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

struct Minimum {
  template <class T>
  HW_DEVICE T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

struct FirstMaximum {  // a NaN is the largest; of equal elements the first
  template <class T>
  HW_DEVICE Indexed<T> operator()(Indexed<T> a, Indexed<T> b) const {
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan ? a : b;
    if (a.value == b.value || a_is_nan) return a.index < b.index ? a : b;
    return a.value > b.value ? a : b;
  }
};

// A uniform number from 0 to below 1: the first word of Philox 4x32-10 of the counter (i, j, k, m) under the key (seed, draw).
HW_DEVICE float philox(uint32_t i, uint32_t j, uint32_t k, uint32_t m, uint32_t seed, uint32_t draw) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{i} * 0xD2511F53u, right = uint64_t{k} * 0xCD9E8D57u;
    i = static_cast<uint32_t>(right >> 32) ^ j ^ seed;
    k = static_cast<uint32_t>(left >> 32) ^ m ^ draw;
    j = static_cast<uint32_t>(right);
    m = static_cast<uint32_t>(left);
    seed += 0x9E3779B9u;
    draw += 0xBB67AE85u;
  }
  return static_cast<float>(i >> 8) * 0x1p-24f;
}

}  // namespace hw
