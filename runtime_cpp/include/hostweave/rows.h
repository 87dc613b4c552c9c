// How threads share a row that they reduce. Kernels are written for any of these: hw::Row where the length of rows is known, else
// hw::RowUpTo, and hw::LongRow for rows that threads cannot hold.
#pragma once
#include "hostweave/kernel.h"

namespace hw {

// The number and the first of those elements of a row that a thread takes together.
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

// What a thread has of a row, in registers.
template <class Elements, int kEach>
struct RegisterRow {
  Elements values[kEach];

  HW_DEVICE const Elements& operator[](const Chunk& j) const { return values[j.number]; }
};
// Where that is too much, it reads it again.
template <class Place, int kWidth>
struct ReloadedRow {
  Place row;

  HW_DEVICE auto operator[](const Chunk& j) const { return hw::load<kWidth>(row + j); }
};

// The threads that share a row: kThreads neighbours of a warp, or where that is more than a warp, or 0 for any number, a block.
#ifdef __CUDACC__
template <int kThreads>
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
  // Which of 0..n rows they take.
  static __device__ Walk<int64_t> of(int64_t n) {
    if constexpr (kLanes == 0) {
      return over_blocks(n);
    } else {
      const Walk<int64_t> threads = over_grid(n);
      return {threads.begin_ / kLanes, n, threads.step_ / kLanes};
    }
  }
  // Joins one value of each. Every one of them gets the result.
  template <class T, class ReduceOp>
  static __device__ T reduce(T value, ReduceOp reduce_op) {
    if constexpr (kLanes == 0) {
      return reduce_block(value, reduce_op);
    } else {
      return reduce_lanes<kLanes>(value, reduce_op);
    }
  }
};
#else
template <int>
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

// A row of kElements, of which each of kThreads threads takes kWidth neighbours the same number of times.
template <int kElements, int kThreads, int kNeighbours>
struct Row : ThreadGroup<kThreads> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = kElements / (ThreadGroup<kThreads>::kCount * kWidth);

  HW_DEVICE int first(int number) const { return (number * this->threads() + this->thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j.number < kEach; }
  HW_DEVICE Chunks<Row> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<Row> end() const { return begin(); }

  template <class Place>
  HW_DEVICE auto load(Place row) const {
    if constexpr (kWidth == 1) {
      return ReloadedRow<Place, 1>{row};
    } else {
      decltype(hw::request<kWidth>(row)) requested[kEach];
#pragma unroll
      for (int number = 0; number < kEach; ++number) requested[number] = hw::request<kWidth>(row + first(number));
      RegisterRow<decltype(hw::load<kWidth>(row)), kEach> held;
#pragma unroll
      for (int number = 0; number < kEach; ++number) held.values[number] = hw::received(requested[number]);
      return held;
    }
  }
};

// A row of some length that its block can hold.
template <int kNeighbours>
struct RowUpTo : ThreadGroup<0> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = kRowAccesses;  // at most

  int length;

  HW_DEVICE explicit RowUpTo(int64_t length) : length(static_cast<int>(length)) {}
  HW_DEVICE int first(int number) const { return (number * threads() + thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j.number < kEach && static_cast<int>(j.index) < length; }
  HW_DEVICE Chunks<RowUpTo> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<RowUpTo> end() const { return begin(); }

  static HW_DEVICE bool fits(int64_t length) { return length <= int64_t{kEach} * threads() * kWidth; }
  template <class Place>
  HW_DEVICE auto load(Place row) const {
    decltype(hw::request<kWidth>(row)) requested[kEach];
#pragma unroll
    for (int number = 0; number < kEach; ++number) {
      if (first(number) < length) requested[number] = hw::request<kWidth>(row + first(number));
    }
    RegisterRow<decltype(hw::load<kWidth>(row)), kEach> held;
#pragma unroll
    for (int number = 0; number < kEach; ++number) {
      if (first(number) < length) held.values[number] = hw::received(requested[number]);
    }
    return held;
  }
};

// A row of any length, which is read again wherever it is needed.
template <int kNeighbours>
struct LongRow : ThreadGroup<0> {
  static constexpr int kWidth = kNeighbours;
  static constexpr int kEach = 1;  // or any number

  int64_t length;

  HW_DEVICE explicit LongRow(int64_t length) : length(length) {}
  HW_DEVICE int64_t first(int number) const { return (int64_t{number} * threads() + thread()) * kWidth; }
  HW_DEVICE bool has(const Chunk& j) const { return j < length; }
  HW_DEVICE Chunks<LongRow> begin() const { return {*this, {first(0), 0}}; }
  HW_DEVICE Chunks<LongRow> end() const { return begin(); }

  template <class Place>
  HW_DEVICE ReloadedRow<Place, kWidth> load(Place row) const {
    return {row};
  }
};

}  // namespace hw
