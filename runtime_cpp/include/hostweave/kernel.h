// Building blocks of generated kernels, for CUDA and for the CPU device. On the CPU device, one thread executes a whole kernel.
// There, every loop covers its whole range, and a reduction over a block returns its argument.
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

// Replaces std::conditional_t, because NVRTC has no <type_traits>.
template <bool kFirst, class A, class B>
struct Choice {
  using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Chosen = typename Choice<kFirst, A, B>::Type;

// Vector width as a type, for template deduction.
template <int kWidth>
struct Width {};

// Vector of consecutive elements.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Values {
  T values[kCount];

  HW_DEVICE T& operator[](int i) { return values[i]; }
  HW_DEVICE const T& operator[](int i) const { return values[i]; }
  // Element i in f32. A bf16 is the upper half of an f32, so one instruction extracts a bf16 from a pair.
  HW_DEVICE float f32(int i) const {
#ifdef __CUDACC__
    if constexpr (kIsBf16<T> && kCount % 2 == 0) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(values)[i / 2];
      return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    }
#endif
    return static_cast<float>(values[i]);
  }
};

template <int kCount, class T>
HW_DEVICE Values<T, kCount> filled(T value) {
  Values<T, kCount> result;
  for (T& each : result.values) each = value;
  return result;
}

// Loads a vector. `first` must be aligned, as checked by `aligned`.
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first) {
  return *reinterpret_cast<const Values<T, kCount>*>(first);
}
// Loads a vector from a pseudo-array, such as hw::Terms.
template <int kCount, class Pointer>
HW_DEVICE auto load(const Pointer& pointer) -> decltype(pointer.template load<kCount>()) {
  return pointer.template load<kCount>();
}
// Reads a bool whose byte may have any value: nonzero is true. For a plain read, the compiler would assume that the byte is 0 or
// 1.
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
template <class T, class From, int kCount>
HW_DEVICE Values<T, kCount> converted(const Values<From, kCount>& values) {
  Values<T, kCount> result;
  if constexpr (requires { round_pairs(values.values, result.values); }) {
    round_pairs(values.values, result.values);
  } else {
    for (int e = 0; e < kCount; ++e) result[e] = T(values[e]);
  }
  return result;
}
template <class T, int kCount>
  requires(sizeof(T) == 1)
HW_DEVICE void store(T* first, const Values<float, kCount>& values) {
  store(first, converted<T>(values));
}

// Starts a load. `received` returns the loaded vector. The elements of a pseudo-array may arrive later; then `received` waits.
template <int kCount, class Pointer>
HW_DEVICE auto request(const Pointer& pointer) {
  if constexpr (requires { pointer.template request<kCount>(); }) {
    return pointer.template request<kCount>();
  } else {
    return hw::load<kCount>(pointer);
  }
}
template <class T, int kCount>
HW_DEVICE Values<T, kCount> received(const Values<T, kCount>& values) {
  return values;
}
template <class Request>
HW_DEVICE auto received(Request& request) -> decltype(request.received()) {
  return request.received();
}

// True if a loop over n elements can use 32-bit indices, which are faster. The limit is below 2^31, because the last index may
// exceed n by a grid stride.
HW_DEVICE bool fits_int32(int64_t n) { return n <= int64_t{1} << 30; }

HW_DEVICE const void* address_of(const void* array) { return array; }

// True if all arrays are aligned to 16 bytes.
template <class... Arrays>
HW_DEVICE bool aligned(const Arrays&... arrays) {
  return (reinterpret_cast<uintptr_t>(address_of(arrays)) | ...) % 16 == 0;
}

// The first column of the vector that a thread computes. Threads past the last column compute the last vector again, and store
// nothing.
struct Column {
  int64_t index;
  bool stores_;

  HW_DEVICE operator int64_t() const { return index; }
  HW_DEVICE bool stores() const { return stores_; }
};

template <int kWidth>
struct Columns {  // for (const Column j : columns)
  int64_t begin_, end_, step_;
  int in_tile_;
  bool first_row_;

  struct Iterator : Walk<int64_t>::Iterator {
    const Columns& columns;
    HW_DEVICE Column operator*() const {
      const int64_t column = this->i + columns.in_tile_;
      return column < columns.end_ ? Column{column, columns.first_row_} : Column{columns.end_ - kWidth, false};
    }
  };
  HW_DEVICE Iterator begin() const { return {{begin_, step_}, *this}; }
  HW_DEVICE Iterator end() const { return {{end_, step_}, *this}; }
};

// Put HW_TOUCHES(hw::reads(x, n), hw::writes(y, n)) first in a kernel. The macro declares the accesses of the kernel. The CPU
// device uses the declarations to detect races.
#ifdef __CUDACC__
#define HW_TOUCHES(...) static_cast<void>(0)
#else
#define HW_TOUCHES(...) \
  if (::hw::tell({__VA_ARGS__})) return
#endif

#ifdef __CUDACC__

// Programmatic dependent launch: the next kernel on the stream may start when all blocks have called this function. The next
// kernel calls griddep_wait to wait until this kernel has ended.
HW_DEVICE void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Programmatic dependent launch: waits until all earlier work on the stream has ended and its writes are visible. Before this
// call, a kernel must not write device memory, and must not read data that earlier work may write. Also lets the next kernel
// start.
HW_DEVICE void griddep_wait() {
  griddep_launch();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// These functions divide indices 0 to n - 1 among the threads of the grid, the blocks of the grid, or the threads of a block.
// Adjacent threads get adjacent vectors of kWidth elements, so that accesses are coalesced. kWidth divides n.
template <int kWidth = 1, class Index = int64_t>
__device__ Walk<Index> over_grid(int64_t n) {
  return {(Index{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth, static_cast<Index>(n), Index{gridDim.x} * blockDim.x * kWidth};
}
HW_DEVICE Walk<int64_t> over_blocks(int64_t n) { return {blockIdx.x, n, gridDim.x}; }
template <int kWidth = 1>
__device__ Walk<int64_t> over_threads(int64_t n) {
  return {int64_t{threadIdx.x} * kWidth, n, int64_t{blockDim.x} * kWidth};
}

// Divides columns 0 to n - 1 among blocks, in tiles. In a tile, adjacent threads own adjacent vectors of kWidth columns.
template <int kWidth = 1>
__device__ Columns<kWidth> over_columns(int64_t n) {
  constexpr int kThreads = kTile / kWidth;
  const int in_tile = threadIdx.x % kThreads * kWidth;
  return {int64_t{blockIdx.x} * kTile, n, int64_t{gridDim.x} * kTile, in_tile, threadIdx.x < kThreads};
}
// Divides rows 0 to n - 1 among the threads of a block that own the same columns.
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

// All-reduces one value over kThreads adjacent threads of a warp. kThreads is a power of 2.
template <int kThreads, class T, class ReduceOp>
__device__ T reduce_lanes(T value, ReduceOp reduce_op) {
  const unsigned mask = (~0u >> (32 - kThreads)) << (threadIdx.x % 32 / kThreads * kThreads);
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) value = reduce_op(value, value_of(value, distance, mask));
  return value;
}

// All-reduces a value over a block of whole warps. kThreads is 0 if the number of threads is unknown at compile time. CUB is not
// used: CUB needs this number, and NVRTC takes two seconds to parse CUB.
template <int kThreads = 0, class T, class ReduceOp>
__device__ T reduce_block(T value, ReduceOp reduce_op) {
  __shared__ T partial[32];
  value = reduce_lanes<32>(value, reduce_op);
  const int warps = (kThreads ? kThreads : blockDim.x) / 32;
  if (warps == 1) return value;
  __syncthreads();  // Waits until the previous result has been read.
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value = reduce_op(value, partial[warp]);
  return value;
}

// Reduces the values of the threads that own the same columns. The first kTile / kWidth threads get the results.
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
  __syncthreads();  // Waits until the previous result has been read.
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
// Like reduce_rows_to_first, but every thread gets the results.
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
#include "hostweave/transpose.h"
