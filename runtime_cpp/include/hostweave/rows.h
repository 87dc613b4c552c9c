// Distributions of a reduced row over threads. hw::Row has a known length. hw::RowUpTo has an unknown length, and threads can
// hold it in registers. hw::LongRow may be longer.
#pragma once
#include "hostweave/cluster.h"
#include "hostweave/kernel.h"

namespace hw {

// A vector access of a thread: the index of the first element, and the number of the access.
struct Chunk {
  int64_t index;
  int number;

  HW_DEVICE operator int64_t() const { return index; }
};

template <class R>
struct Chunks {  // for (const Chunk j : row)
  const R& row;
  Chunk j;

  HW_DEVICE Chunk operator*() const { return j; }
  HW_DEVICE void operator++() { j = {row.first(j.number + 1), j.number + 1}; }
  HW_DEVICE bool operator!=(const Chunks&) const { return row.has(j); }
};

// A thread's elements of a row, in registers.
template <class Elements, int kEach>
struct RegisterRow {
  Elements values[kEach];

  HW_DEVICE const Elements& operator[](const Chunk& j) const { return values[j.number]; }
};

// A row whose elements are computed or loaded again at each use.
template <class Compute>
struct RecomputedRow {
  Compute compute;

  HW_DEVICE auto operator[](const Chunk& j) const { return compute(j); }
};

// Computes a thread's elements of a row, and holds them in registers.
template <class Row, class Compute>
HW_DEVICE auto hold_row(const Row& row, Compute compute) {
  RegisterRow<decltype(compute(Chunk{})), Row::kEach> held;
#pragma unroll
  for (int number = 0; number < Row::kEach; ++number) {
    if (const Chunk j{row.first(number), number}; row.has(j)) held.values[number] = compute(j);
  }
  return held;
}
// Loads a thread's elements of a row from memory. Starts all loads before it waits for the first.
template <class Row, class Pointer>
HW_DEVICE auto load_row(const Row& row, Pointer first) {
  auto requested = hold_row(row, [&](const Chunk j) { return hw::request<Row::kWidth>(first + j); });
  return hold_row(row, [&](const Chunk j) { return hw::received(requested.values[j.number]); });
}

// Threads that share a row. If kThreads is 1 to 32, these are kThreads adjacent threads of a warp. Otherwise, these are the
// threads of a block. If kThreads is 0, the size of the block is unknown at compile time.
#ifdef __CUDACC__
template <int kThreads, int kBlocks = 1>
struct ThreadGroup {
  static constexpr int kCount = kThreads;
  static constexpr int kLanes = kThreads > 32 ? 0 : kThreads;

  static __device__ int thread() {
    if constexpr (kLanes == 0) {
      return threadIdx.x;
    } else {
      return threadIdx.x % kLanes;
    }
  }
  static __device__ int threads() { return kThreads ? kThreads : blockDim.x; }
  static __device__ bool first_thread() { return thread() == 0; }
  // Rows of 0..n that the group processes.
  static __device__ Walk<int64_t> of(int64_t n) {
    if constexpr (kLanes == 0) {
      return over_blocks(n);
    } else {
      const Walk<int64_t> threads = over_grid(n);
      return {threads.begin_ / kLanes, n, threads.step_ / kLanes};
    }
  }
  // All-reduces one value per thread.
  template <class T, class ReduceOp>
  static __device__ T reduce(T value, ReduceOp reduce_op) {
    if constexpr (kLanes == 0) {
      return reduce_block<kThreads>(value, reduce_op);
    } else {
      return reduce_lanes<kLanes>(value, reduce_op);
    }
  }
};
#if __CUDA_ARCH__ >= 900
// Blocks of a cluster that share a row.
template <int kThreads, int kBlocks>
  requires(kBlocks > 1)
struct ThreadGroup<kThreads, kBlocks> {
  static constexpr int kCount = kThreads * kBlocks;

  mutable int reduced = 0;  // number of calls of reduce

  __device__ ThreadGroup() { Cluster::arrive(); }
  static __device__ int thread() { return Cluster::rank() * kThreads + threadIdx.x; }
  static __device__ int threads() { return kCount; }
  static __device__ bool first_thread() { return thread() == 0; }
  static __device__ Walk<int64_t> of(int64_t n) { return {blockIdx.x / kBlocks, n, gridDim.x / kBlocks}; }
  template <class T, class ReduceOp>
  __device__ T reduce(T value, ReduceOp reduce_op) const {
    // Calls use the rows of `partial` alternately, because a block may call `reduce` again while other blocks still read.
    __shared__ T partial[2][kBlocks];
    T* const parts = partial[reduced % 2];
    value = reduce_block<kThreads>(value, reduce_op);
    if (reduced++ == 0) Cluster::wait();  // Waits until all blocks have started.
    if (threadIdx.x < kBlocks) Cluster::give(threadIdx.x, parts[Cluster::rank()], value);
    Cluster::meet();
    value = parts[0];
    for (int block = 1; block < kBlocks; ++block) value = reduce_op(value, parts[block]);
    return value;
  }
};
#endif
#else
template <int, int = 1>
struct ThreadGroup {
  static constexpr int kCount = 1;

  static int thread() { return 0; }
  static int threads() { return 1; }
  static bool first_thread() { return true; }
  static Walk<int64_t> of(int64_t n) { return {0, n, 1}; }
  template <class T, class ReduceOp>
  static T reduce(T value, ReduceOp) {
    return value;
  }
};
#endif

// A row of kElements elements, shared by kBlocks blocks of kThreads threads. Each thread makes the same number of accesses of
// kWidth elements.
template <int kElements, int kThreads, int kNeighbours, int kBlocks = 1>
struct Row : ThreadGroup<kThreads, kBlocks> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = kElements / (ThreadGroup<kThreads, kBlocks>::kCount * kWidth);

  HW_DEVICE int first(int number) const { return (number * this->threads() + this->thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j.number < kEach; }
  HW_DEVICE Chunks<Row> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<Row> end() const { return begin(); }

  template <class Pointer>
  HW_DEVICE auto load(Pointer row) const {
    if constexpr (kWidth == 1) {
      return hold([row](const Chunk& j) { return hw::load<1>(row + j); });
    } else {
      return load_row(*this, row);
    }
  }
  // Holds a computed row in registers if kWidth exceeds 1. Otherwise computes the elements at each use. `compute` returns the
  // elements of a chunk.
  template <class Compute>
  HW_DEVICE auto hold(Compute compute) const {
    if constexpr (kWidth == 1) {
      return RecomputedRow<Compute>{compute};
    } else {
      return hold_row(*this, compute);
    }
  }
};

// A row of unknown length that a block can hold in registers.
template <int kNeighbours>
struct RowUpTo : ThreadGroup<0> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = kRowAccesses;  // maximum accesses per thread

  int length;

  HW_DEVICE explicit RowUpTo(int64_t length) : length(static_cast<int>(length)) {}
  HW_DEVICE int first(int number) const { return (number * threads() + thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j.number < kEach && static_cast<int>(j.index) < length; }
  HW_DEVICE Chunks<RowUpTo> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<RowUpTo> end() const { return begin(); }

  static HW_DEVICE bool fits(int64_t length) { return length <= int64_t{kEach} * threads() * kWidth; }
  template <class Pointer>
  HW_DEVICE auto load(Pointer row) const {
    return load_row(*this, row);
  }
  template <class Compute>
  HW_DEVICE auto hold(Compute compute) const {
    return hold_row(*this, compute);
  }
};

// A row of any length, loaded or computed again at each use.
template <int kNeighbours>
struct LongRow : ThreadGroup<0> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = 1;  // factor by which loops over the row are unrolled; not the number of accesses

  int64_t length;

  HW_DEVICE explicit LongRow(int64_t length) : length(length) {}
  HW_DEVICE int64_t first(int number) const { return (int64_t{number} * threads() + thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j < length; }
  HW_DEVICE Chunks<LongRow> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<LongRow> end() const { return begin(); }

  template <class Pointer>
  HW_DEVICE auto load(Pointer row) const {
    return hold([row](const Chunk& j) { return hw::load<kWidth>(row + j); });
  }
  template <class Compute>
  HW_DEVICE RecomputedRow<Compute> hold(Compute compute) const {
    return {compute};
  }
};

}  // namespace hw
