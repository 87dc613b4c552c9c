// Scatter, scans and sorting, and the indices of gathers. A fiber is a 1-D slice of an array along the dim of the op. If the
// fibers of the result are contiguous, a block or a team of blocks processes a fiber. Otherwise, a thread processes a fiber or a
// part of a fiber.
#pragma once
#include "hostweave/cluster.h"
#include "hostweave/index.h"
#include "hostweave/rows.h"

namespace hw {

// Index into n elements. On a GPU, an invalid index is clamped. On the CPU device, an invalid index makes the call fail.
template <class T>
HW_DEVICE int64_t index(T id, int64_t n) {
  const bool below = id < T(1) && id != T(0), above = !below && static_cast<uint64_t>(id) >= static_cast<uint64_t>(n);
#ifdef __CUDACC__
  return below ? 0 : above ? n - 1 : static_cast<int64_t>(id);
#else
  if (below || above) [[unlikely]]
    index_out_of_range(below, static_cast<uint64_t>(id), n);
  return static_cast<int64_t>(id);
#endif
}

// Start of a slice, clamped to the n possible starts.
template <class T>
HW_DEVICE int64_t start(T id, int64_t n) {
  const bool below = id < T(1);
  return below ? 0 : static_cast<uint64_t>(id) >= static_cast<uint64_t>(n) ? n - 1 : static_cast<int64_t>(id);
}

// First global index that this rank holds; 0 if there is none.
HW_DEVICE int64_t first(const int64_t* rows, int64_t n) { return n > 0 ? rows[0] : 0; }

// Range of global indices that this rank holds.
struct Rows {
  int64_t first, length;
};

template <class T>
struct Fiber {
  T* first;
  int64_t length, stride;

  HW_DEVICE T& operator[](int64_t i) const { return first[i * stride]; }
};
template <class T>
HW_DEVICE Fiber<T> fiber(T* first, int64_t length, int64_t stride) {
  return {first, length, stride};
}

// Conversions between elements and accumulators.
template <class T>
HW_DEVICE auto accumulated(T x) {
  if constexpr (__is_class(T)) {
    return static_cast<float>(x);
  } else {
    return x;
  }
}
template <class T, class Total>
HW_DEVICE T from_total(const Total& total) {
  if constexpr (__is_class(T)) {
    return T(static_cast<float>(total));
  } else {
    return static_cast<T>(total);
  }
}

using Fibers = ThreadGroup<1>;

#ifdef __CUDACC__
// The threads of a block. All blocks of a Team visit the same fibers. Only the ops of sort.h divide a fiber among these blocks.
struct BlockFibers : ThreadGroup<0> {
  static __device__ void sync() { __syncthreads(); }
  static __device__ Walk<int64_t> of(int64_t n) {
    if (Team::is_grid()) return {0, n, 1};
    const int blocks = Cluster::size();
    return {blockIdx.x / blocks, n, gridDim.x / blocks};
  }
};

// Inclusive prefix sum over the threads, and the total.
template <class T>
__device__ T sums_so_far(BlockFibers, T value, T& all) {
  __shared__ T of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += before;
  }
  __syncthreads();  // Waits until the previous sums have been read.
  if (lane == 31) of_warps[warp] = value;
  __syncthreads();
  all = T(0);
  for (int other = 0; other < warps; ++other) {
    if (other == warp) value += all;
    all += of_warps[other];
  }
  return value;
}
#else
using BlockFibers = Fibers;
#endif

// Elements of a fiber whose index modulo kParts is `part`. Adjacent threads process the same part of adjacent fibers.
struct FiberPart {
#ifdef __CUDACC__
  static constexpr int kParts = kFiberParts;
#else
  static constexpr int kParts = 1;
#endif
  int64_t index;
  int part;

  HW_DEVICE operator int64_t() const { return index; }
  HW_DEVICE int thread() const { return part; }
  HW_DEVICE int threads() const { return kParts; }
};

struct FiberParts {  // for (const FiberPart i : FiberParts{n})
  int64_t n;

  struct Iterator : Walk<int64_t>::Iterator {
    int64_t n;
    HW_DEVICE FiberPart operator*() const { return {i % n, static_cast<int>(i / n)}; }
  };
  HW_DEVICE Iterator begin() const { return {over_grid(n * FiberPart::kParts).begin(), n}; }
  HW_DEVICE Iterator end() const { return {over_grid(n * FiberPart::kParts).end(), n}; }
};

// y[i] = x[0] + ... + x[i]
template <class Total, class T, class U>
HW_DEVICE void cumsum(Fibers, Fiber<T> x, Fiber<U> y) {
  Total total{};
  for (int64_t i = 0; i < y.length; ++i) {
    total += accumulated(x[i]);
    y[i] = from_total<U>(total);
  }
}
#ifdef __CUDACC__
template <class Total, class T, class U>
__device__ void cumsum(BlockFibers block, Fiber<T> x, Fiber<U> y) {
  Total before{};
  for (int64_t tile = 0; tile < y.length; tile += block.threads()) {
    const int64_t i = tile + block.thread();
    Total all;
    const Total sum = sums_so_far(block, i < y.length ? Total(accumulated(x[i])) : Total(0), all);
    if (i < y.length) y[i] = from_total<U>(before + sum);
    before += all;
  }
}
#endif

// y[x[i]] = i, for an x that contains each of 0, 1, ..., n - 1 once.
template <class Group, class T>
HW_DEVICE void inverse_order(Group group, Fiber<T> x, Fiber<int64_t> y) {
  for (int64_t i = group.thread(); i < y.length; i += group.threads()) y[index(x[i], y.length)] = i;
}

// Sorts elements by their group x[i]. An element has a group if x[i] is from 0 to kGroups - 1. Writes three lists to y: the end
// of each group, the indices of the elements in sorted order, and the position of each element in this order. Elements without a
// group have position 0. The rest of the second list is 0.
template <class U>
struct GroupOrder {
  Fiber<U> y;
  int64_t groups, length;

  HW_DEVICE U& end(int64_t group) const { return y[group]; }
  HW_DEVICE U& index(int64_t position) const { return y[groups + position]; }
  HW_DEVICE U& position(int64_t i) const { return y[groups + length + i]; }
};
template <int kGroups, class T, class U>
HW_DEVICE void group_order(Fibers, Fiber<T> x, Fiber<U> y) {
  const GroupOrder<U> order{y, kGroups, x.length};
  const auto has_group = [&](int64_t i) { return x[i] >= 0 && x[i] < kGroups; };
  for (int group = 0; group < kGroups; ++group) order.end(group) = 0;
  for (int64_t i = 0; i < x.length; ++i) {
    if (has_group(i)) ++order.end(x[i]);
  }
  U total = 0;
  for (int group = 0; group < kGroups; ++group) {
    const U count = order.end(group);
    order.end(group) = total, total += count;
  }
  for (int64_t i = 0; i < x.length; ++i) {
    const U position = order.position(i) = has_group(i) ? order.end(x[i])++ : 0;
    if (has_group(i)) order.index(position) = static_cast<U>(i);
  }
  for (int64_t i = total; i < x.length; ++i) order.index(i) = 0;
}
#ifdef __CUDACC__
// Divides the elements into consecutive parts. One warp per part counts the elements of each group. With more than 9216 groups,
// one thread sorts all elements. Elements of one group keep their order.
template <int kGroups, class T, class U>
__device__ void group_order(BlockFibers block, Fiber<T> x, Fiber<U> y) {
  constexpr int kFit = 9216 / kGroups, kMost = kFit < 32 ? kFit : 32, kAtOnce = 4;
  if constexpr (kMost == 0) {
    if (block.thread() == 0) group_order<kGroups>(Fibers(), x, y);
  } else {
    __shared__ int counts[kMost][kGroups];  // number of elements of a group in a part; later the position of the next element
    const GroupOrder<U> order{y, kGroups, x.length};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = block.threads() / 32,
              parts = warps < kMost ? warps : kMost;
    const int64_t tiles = (x.length + 32 * parts - 1) / (32 * parts), begin = warp * tiles * 32, all = begin + tiles * 32;
    const int64_t end = warp >= parts ? begin : all < x.length ? all : x.length;
    const auto for_each = [&](auto use) {  // Each thread of a warp calls use(i, group or -1, mask of threads with that group).
      for (int64_t tile = begin; tile < end; tile += 32 * kAtOnce) {
        int groups[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int64_t i = tile + j * 32 + lane;
          const int64_t group = i < end ? static_cast<int64_t>(x[i]) : -1;
          groups[j] = group >= 0 && group < kGroups ? static_cast<int>(group) : -1;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (tile + j * 32 < end) use(tile + j * 32 + lane, groups[j], __match_any_sync(~0u, groups[j]));
        }
      }
    };
    const auto add = [&](int group, unsigned same) {
      __syncwarp();
      if (group >= 0 && __ffs(same) - 1 == lane) counts[warp][group] += __popc(same);
      __syncwarp();
    };
    __syncthreads();  // Waits until the counts of the previous fiber have been read.
    for (int i = threadIdx.x; i < parts * kGroups; i += block.threads()) counts[i / kGroups][i % kGroups] = 0;
    __syncthreads();
    for_each([&](int64_t, int group, unsigned same) { add(group, same); });
    __syncthreads();
    int total = 0;
    for (int tile = 0; tile < kGroups; tile += block.threads()) {
      const int group = tile + threadIdx.x;
      int own = 0, of_tile;
      for (int part = 0; part < parts && group < kGroups; ++part) own += counts[part][group];
      const int sum = total + sums_so_far(block, own, of_tile);
      if (group < kGroups) order.end(group) = sum;
      for (int part = parts - 1, position = sum; part >= 0 && group < kGroups; --part) {
        position -= counts[part][group];
        counts[part][group] = position;
      }
      total += of_tile;
    }
    __syncthreads();
    for_each([&](int64_t i, int group, unsigned same) {
      const int position = group < 0 ? 0 : counts[warp][group] + __popc(same & ((1u << lane) - 1));
      if (i < end) order.position(i) = position;
      if (group >= 0) order.index(position) = static_cast<U>(i);
      add(group, same);
    });
    for (int64_t i = total + threadIdx.x; i < x.length; i += block.threads()) order.index(i) = 0;
  }
}

// True if all threads of this warp are active and have the same part number and index array.
inline __device__ bool is_one_warp(FiberPart own, const int64_t* index) {
  if (__activemask() != ~0u) return false;
  int same_part, same_index;
  __match_all_sync(~0u, own.part, &same_part);
  __match_all_sync(~0u, reinterpret_cast<unsigned long long>(index), &same_index);
  return same_part && same_index;
}
template <class Group>
__device__ bool is_one_warp(Group, const int64_t*) {
  return false;
}
#endif

// Calls write(i, index[i] - rows.first) for each source element i whose destination index[i] is on this rank. One thread makes
// all writes to a destination, in the order of i.
template <class Group, class Write>
HW_DEVICE void for_each_sent(Group group, Fiber<const int64_t> index, Rows rows, Write write) {
#ifdef __CUDACC__
  if (is_one_warp(group, index.first)) {  // Each thread loads one index, and the warp shares the indices.
    for (int64_t tile = 0; tile < index.length; tile += 32) {
      const int64_t i = tile + threadIdx.x % 32;
      const int64_t position = i < index.length ? index[i] - rows.first : -1;
      const bool is_theirs = position >= 0 && position < rows.length && position % group.threads() == group.thread();
      for (unsigned sent = __ballot_sync(~0u, is_theirs); sent; sent &= sent - 1) {
        const int from = __ffs(sent) - 1;
        write(tile + from, __shfl_sync(~0u, position, from));
      }
    }
    return;
  }
#endif
  for (int64_t i = 0; i < index.length; ++i) {
    const int64_t position = index[i] - rows.first;
    if (position >= 0 && position < rows.length && position % group.threads() == group.thread()) write(i, position);
  }
}

// Copies x to y. Then writes source[i] to global index index[i] if this rank holds that index. The last write to an index wins.
template <class Group, class T>
HW_DEVICE void scatter(Group group, Fiber<const T> x, Fiber<const int64_t> index, Fiber<const T> source, Rows rows, Fiber<T> y) {
  for (int64_t i = group.thread(); i < y.length; i += group.threads()) y[i] = x[i];
  for_each_sent(group, index, rows, [&](int64_t i, int64_t position) { y[position] = source[i]; });
}

// y[i] is the sum of source[j] over all j with index[j] == rows.first + i. The sum is rounded to T after each addition.
template <class Group, class T>
HW_DEVICE void scatter_sum(Group group, Fiber<const int64_t> index, Fiber<const T> source, Rows rows, Fiber<T> y) {
  for (int64_t i = group.thread(); i < y.length; i += group.threads()) y[i] = T(0.0f);
  for_each_sent(group, index, rows, [&](int64_t i, int64_t position) {
    y[position] = from_total<T>(Add()(accumulated(y[position]), accumulated(source[i])));
  });
}

}  // namespace hw

#include "hostweave/sort.h"
