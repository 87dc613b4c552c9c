// What kernels are written with, for CUDA and for the CPU device. There one thread in one block runs the whole kernel, so
// every loop below covers its whole range and a reduction over the block has nothing left to do.
#pragma once
#include <cstdint>

#include "hostweave/math.h"
#include "hostweave/reduce_ops.h"
#include "hostweave/threads.h"
#include "hostweave/types.h"

namespace hw {

template <class Index>
struct Walk {  // for (Index i : walk)
  Index begin_, end_, step_;

  struct Iterator {
    Index i, step;
    HW_DEVICE Index operator*() const { return i; }
    HW_DEVICE void operator++() { i += step; }
    HW_DEVICE bool operator!=(const Iterator& end) const { return i < end.i; }
  };
  HW_DEVICE Iterator begin() const { return {begin_, step_}; }
  HW_DEVICE Iterator end() const { return {end_, step_}; }
};

// How many neighbouring elements a thread takes together, as a type to deduce it from.
template <int kWidth>
struct Width {};

// Neighbouring elements that a thread reads, writes or computes together.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Values {
  T values[kCount];

  HW_DEVICE T& operator[](int i) { return values[i]; }
  HW_DEVICE const T& operator[](int i) const { return values[i]; }
};

template <int kCount, class T>
HW_DEVICE Values<T, kCount> filled(T value) {
  Values<T, kCount> result;
  for (T& each : result.values) each = value;
  return result;
}

// Neighbouring elements, of which the first lies where `aligned` said that all may.
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first) {
  return *reinterpret_cast<const Values<T, kCount>*>(first);
}
// Of what is an array to a kernel alone, as hw::Terms are.
template <int kCount, class Place>
HW_DEVICE auto load(const Place& place) -> decltype(place.template load<kCount>()) {
  return place.template load<kCount>();
}
// Bools as memory has them, in which any byte but 0 is true; to the compiler there are no others than 0 and 1.
HW_DEVICE bool truth(const bool& element) { return reinterpret_cast<const unsigned char&>(element) != 0; }
template <int kCount>
HW_DEVICE Values<bool, kCount> load(const bool* first) {
  const auto bytes = load<kCount>(reinterpret_cast<const unsigned char*>(first));
  Values<bool, kCount> result;
  for (int i = 0; i < kCount; ++i) result[i] = bytes[i] != 0;
  return result;
}
template <class T, int kCount>
HW_DEVICE void store(T* first, const Values<T, kCount>& values) {
  *reinterpret_cast<Values<T, kCount>*>(first) = values;
}

// What is loaded where others may be asked for first: memory at once, what is an array to a kernel alone when it is there.
template <int kCount, class T>
HW_DEVICE Values<T, kCount> request(const T* first) {
  return hw::load<kCount>(first);
}
template <int kCount, class Place>
HW_DEVICE auto request(const Place& place) -> decltype(place.template request<kCount>()) {
  return place.template request<kCount>();
}
template <class T, int kCount>
HW_DEVICE Values<T, kCount> received(const Values<T, kCount>& values) {
  return values;
}
template <class Request>
HW_DEVICE auto received(Request& request) -> decltype(request.received()) {
  return request.received();
}

// Whether indices of 0..n, and of a step past them, have 32 bits: kernels that divide them are the faster for it.
HW_DEVICE bool fits_int32(int64_t n) { return n <= int64_t{1} << 30; }

HW_DEVICE const void* place_of(const void* array) { return array; }

// Whether arrays begin where accesses of 16 bytes may.
template <class... Arrays>
HW_DEVICE bool aligned(const Arrays&... arrays) {
  return (reinterpret_cast<uintptr_t>(place_of(arrays)) | ...) % 16 == 0;
}

// A column of a tile, or the first of those that a thread takes together, and threads below it take rows of. Threads past the
// last column walk the last ones again, and store nothing.
struct Column {
  int64_t index;
  bool stores_;

  HW_DEVICE operator int64_t() const { return index; }
  // Whether this thread stores what the block computed together.
  HW_DEVICE bool stores() const { return stores_; }
};

template <int kWidth>
struct Columns {  // for (const Column j : columns)
  int64_t begin_, end_, step_;
  int in_tile_;
  bool first_row_;

  struct Iterator {
    int64_t tile;
    const Columns& columns;
    HW_DEVICE Column operator*() const {
      const int64_t column = tile + columns.in_tile_;
      return column < columns.end_ ? Column{column, columns.first_row_} : Column{columns.end_ - kWidth, false};
    }
    HW_DEVICE void operator++() { tile += columns.step_; }
    HW_DEVICE bool operator!=(const Iterator& end) const { return tile < end.tile; }
  };
  HW_DEVICE Iterator begin() const { return {begin_, *this}; }
  HW_DEVICE Iterator end() const { return {end_, *this}; }
};

// HW_TOUCHES(hw::reads(x, n), hw::writes(y, n)): the elements that a kernel reads and writes, from which the CPU device sees
// which kernels may overlap. It stands first in a kernel. To CUDA it is nothing.
#ifdef __CUDACC__
#define HW_TOUCHES(...) static_cast<void>(0)
#else
#define HW_TOUCHES(...) \
  if (::hw::tell({__VA_ARGS__})) return
#endif

#ifdef __CUDACC__

// From now on the next kernel on the stream may launch, which waits for the end of this one by itself.
HW_DEVICE void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when all that is before the kernel on its stream has ended and is visible: hw::launch_pdl does not wait for that.
// Nothing that a kernel before may write is read until then. The next kernel may come to wait for this one.
HW_DEVICE void griddep_wait() {
  griddep_launch();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 0..n in steps of kWidth elements, which divides n: shared among the threads of the grid, among its blocks, among the threads of
// a block. Neighbouring threads take neighbouring elements.
template <int kWidth = 1, class Index = int64_t>
__device__ Walk<Index> over_grid(int64_t n) {
  return {(Index{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth, static_cast<Index>(n), Index{gridDim.x} * blockDim.x * kWidth};
}
HW_DEVICE Walk<int64_t> over_blocks(int64_t n) { return {blockIdx.x, n, gridDim.x}; }
template <int kWidth = 1>
__device__ Walk<int64_t> over_threads(int64_t n) {
  return {int64_t{threadIdx.x} * kWidth, n, int64_t{blockDim.x} * kWidth};
}

// Columns 0..n, of which each block takes tiles; in a tile neighbouring threads take neighbouring columns, kWidth each.
template <int kWidth = 1>
__device__ Columns<kWidth> over_columns(int64_t n) {
  constexpr int kThreads = kTile / kWidth;
  const int in_tile = threadIdx.x % kThreads * kWidth;
  return {int64_t{blockIdx.x} * kTile, n, int64_t{gridDim.x} * kTile, in_tile, threadIdx.x < kThreads};
}
// 0..n shared among those of a block's kThreads threads that have the same columns.
template <int kThreads, int kWidth = 1>
__device__ Walk<int64_t> over_rows(int64_t n) {
  constexpr int kAside = kTile / kWidth;
  return {threadIdx.x / kAside, n, kThreads / kAside};
}

HW_DEVICE bool first_thread() { return threadIdx.x == 0; }

template <class T>
__device__ T value_of(T value, int distance, unsigned threads = ~0u) {
  return __shfl_xor_sync(threads, value, distance);
}
template <class T>
__device__ Indexed<T> value_of(Indexed<T> one, int distance, unsigned threads = ~0u) {
  return {__shfl_xor_sync(threads, one.value, distance), __shfl_xor_sync(threads, one.index, distance)};
}

// Joins one value of each of kThreads neighbours of a warp, a power of 2. Every one of them gets the result.
template <int kThreads, class T, class ReduceOp>
__device__ T reduce_lanes(T value, ReduceOp reduce_op) {
  const unsigned mask = (~0u >> (32 - kThreads)) << (threadIdx.x % 32 / kThreads * kThreads);
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) value = reduce_op(value, value_of(value, distance, mask));
  return value;
}

// Joins one value of every thread of a block, which has whole warps. Every thread gets the result. CUB has this for blocks of a
// size that the compiler knows, which takes NVRTC two seconds to read; these follow the length of the rows.
template <class T, class ReduceOp>
__device__ T reduce_block(T value, ReduceOp reduce_op) {
  __shared__ T partial[32];
  value = reduce_lanes<32>(value, reduce_op);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  __syncthreads();  // until the reduction before has been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value = reduce_op(value, partial[warp]);
  return value;
}

// Joins the values that those of a block's kThreads threads have which share columns. The threads of the first row get the
// results.
template <int kThreads, class T, int kWidth, class ReduceOp>
__device__ Values<T, kWidth> reduce_rows_to_first(Values<T, kWidth> values, ReduceOp reduce_op) {
  constexpr int kAside = kTile / kWidth, kWarps = kThreads / 32;
  __shared__ T partial[kWarps][kTile];
  const int first = threadIdx.x % kAside * kWidth;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
#pragma unroll
    for (int distance = 16; distance >= kAside; distance /= 2) values[e] = reduce_op(values[e], value_of(values[e], distance));
  }
  __syncthreads();  // until the reduction before has been read
  if (threadIdx.x % 32 < kAside) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) partial[threadIdx.x / 32][first + e] = values[e];
  }
  __syncthreads();
  if (threadIdx.x < kTile) {
    T total = partial[0][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) total = reduce_op(total, partial[warp][threadIdx.x]);
    partial[0][threadIdx.x] = total;
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[e] = partial[0][first + e];
  }
  return values;
}
// The same, but every thread gets the results.
template <int kThreads, class T, int kWidth, class ReduceOp>
__device__ Values<T, kWidth> reduce_rows(Values<T, kWidth> values, ReduceOp reduce_op) {
  constexpr int kAside = kTile / kWidth;
  __shared__ Values<T, kWidth> totals[kAside];
  values = reduce_rows_to_first<kThreads>(values, reduce_op);
  if (threadIdx.x < kAside) totals[threadIdx.x] = values;
  __syncthreads();
  return totals[threadIdx.x % kAside];
}
template <int kThreads, class T, class ReduceOp>
__device__ T reduce_rows_to_first(T value, ReduceOp reduce_op) {
  return reduce_rows_to_first<kThreads>(Values<T, 1>{value}, reduce_op)[0];
}
template <int kThreads, class T, class ReduceOp>
__device__ T reduce_rows(T value, ReduceOp reduce_op) {
  return reduce_rows<kThreads>(Values<T, 1>{value}, reduce_op)[0];
}

#else

HW_DEVICE void griddep_wait() {}

template <int kWidth = 1, class Index = int64_t>
Walk<Index> over_grid(int64_t n) {
  return {0, static_cast<Index>(n), kWidth};
}
HW_DEVICE Walk<int64_t> over_blocks(int64_t n) { return {0, n, 1}; }
template <int kWidth = 1>
Walk<int64_t> over_threads(int64_t n) {
  return {0, n, kWidth};
}
template <int kWidth = 1>
Columns<kWidth> over_columns(int64_t n) {
  return {0, n, kWidth, 0, true};
}
template <int kThreads, int kWidth = 1>
Walk<int64_t> over_rows(int64_t n) {
  return {0, n, 1};
}

HW_DEVICE bool first_thread() { return true; }

template <class T, class ReduceOp>
T reduce_block(T value, ReduceOp) {
  return value;
}

template <int kThreads, class T, class ReduceOp>
T reduce_rows_to_first(T values, ReduceOp) {
  return values;
}
template <int kThreads, class T, class ReduceOp>
T reduce_rows(T values, ReduceOp) {
  return values;
}

#endif

}  // namespace hw

#include "hostweave/rows.h"
