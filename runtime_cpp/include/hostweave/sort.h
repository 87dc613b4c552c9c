// Sorting of a fiber: of all elements, or of only the first elements in sorted order.
#pragma once
#include "hostweave/fibers.h"

namespace hw {

// Unsigned key that has the sort order of the elements. NaN is the largest element, and both zeros are equal.
template <bool kDescending, class T>
HW_DEVICE auto sort_key(T element) {
  const auto x = accumulated(element);
  using X = decltype(accumulated(element));
  using Key = Chosen<sizeof(X) == 8, uint64_t, uint32_t>;
  constexpr Key kTop = Key(1) << (sizeof(Key) * 8 - 1);
  Key key;
  if constexpr (X(0.5f) != X(0)) {
    key = __builtin_bit_cast(Key, x + X(0));
    key = x != x ? ~Key(0) : key & kTop ? Key(~key) : Key(key | kTop);
  } else {
    key = X(-1) < X(0) ? Key(x) ^ kTop : Key(x);
  }
  return kDescending ? Key(~key) : key;
}

#ifdef __CUDACC__
__device__ inline uint64_t packed(uint32_t key, int64_t index) { return uint64_t{key} << 32 | static_cast<uint64_t>(index); }

// Sorts a tile by a sorting network (Batcher, "Sorting networks and their applications", 1968). Every comparator moves the
// smaller number to the lower index, so a tile of any length needs no padding.
template <class Less>
__device__ void sort_tile(BlockFibers block, uint64_t* tile, int n, Less less) {
  const auto step = [&](int flips) {
    block.sync();
    for (int i = block.thread(); i < n; i += block.threads()) {
      const int other = i ^ flips;
      if (other <= i || other >= n) continue;
      const uint64_t a = tile[i], b = tile[other];
      if (less(b, a)) tile[i] = b, tile[other] = a;
    }
  };
  for (int length = 2; length / 2 < n; length *= 2) {
    step(length - 1);
    for (int distance = length / 4; distance > 0; distance /= 2) step(distance);
  }
  block.sync();
}

// Calls take(i, key) for all elements. If the fiber is contiguous and aligned, a thread loads several elements at once.
template <bool kDescending, class T, class Take>
__device__ void for_each_key(BlockFibers block, Fiber<T> x, Take take) {
  constexpr int kWidth = 16 / sizeof(T), kAtOnce = 4;
  int64_t done = 0;
  if (x.stride == 1 && aligned(x.first)) {
    const int64_t accesses = x.length / kWidth, threads = block.threads();
    for (int64_t first = block.thread(); first < accesses; first += kAtOnce * threads) {
      decltype(load<kWidth>(x.first)) elements[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * threads < accesses) elements[j] = load<kWidth>(x.first + (first + j * threads) * kWidth);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * threads >= accesses) continue;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) take((first + j * threads) * kWidth + e, sort_key<kDescending>(elements[j][e]));
      }
    }
    done = accesses * kWidth;
  }
  for (int64_t i = done + block.thread(); i < x.length; i += block.threads()) take(i, sort_key<kDescending>(x[i]));
}

// Exclusive prefix sum of digit counts.
__device__ inline void sum_before(BlockFibers block, uint32_t* counts, int n) {
  uint32_t before = 0;
  for (int first = 0; first < n; first += block.threads()) {
    const int i = first + block.thread();
    const uint32_t count = i < n ? counts[i] : 0;
    uint32_t all;
    const uint32_t so_far = sums_so_far(block, count, all);
    if (i < n) counts[i] = before + so_far - count;
    before += all;
  }
  block.sync();
}

// Finds the first k = order.length elements of a long row in sorted order. Each thread computes the minimum of its keys. The
// elements with keys up to the k-th smallest minimum are the candidates; there are at least k candidates. Returns false if there
// are more than kSorted candidates, for example because many elements are equal.
template <bool kDescending, class T>
__device__ bool order_few(BlockFibers block, Fiber<T> x, Fiber<int64_t> order, uint64_t* tile) {
  __shared__ int taken;
  uint32_t least = ~0u;
  for_each_key<kDescending>(block, x, [&](int64_t, uint32_t key) { least = key < least ? key : least; });
  const auto less = [](uint64_t a, uint64_t b) { return a < b; };
  tile[block.thread()] = least;
  if (block.thread() == 0) taken = 0;
  sort_tile(block, tile, block.threads(), less);
  const uint32_t bound = static_cast<uint32_t>(tile[order.length - 1]);
  block.sync();
  for_each_key<kDescending>(block, x, [&](int64_t i, uint32_t key) {
    if (key > bound) return;
    const int position = atomicAdd(&taken, 1);
    if (position < kSorted) tile[position] = packed(key, i);
  });
  block.sync();
  const int count = taken;
  if (count > kSorted) return false;
  sort_tile(block, tile, count, less);
  for (int64_t i = block.thread(); i < order.length; i += block.threads()) order[i] = static_cast<uint32_t>(tile[i]);
  return true;
}

// Selects the first `left` elements in sorted order, and writes their indices to `tile` in any order. From equal elements,
// selects those with low indices. Radix select: counts elements per value of a digit, from the highest digit, to find the last
// selected key.
template <bool kDescending, class T>
__device__ void choose(BlockFibers block, Fiber<T> x, int64_t left, uint64_t* tile) {
  using Key = decltype(sort_key<kDescending>(x[0]));
  constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
  __shared__ uint32_t digit, before_digit, of_digit, taken, of_warps[32];  // of_warps: equal elements per warp
  const int64_t length = left;
  Key digits = 0, known = 0;  // known digits of the last selected element's key, and the mask of these bits
  bool all = false;           // true if all elements with these digits are selected
  for (int end = sizeof(Key) * 8; end > 0 && !all; end -= kDigitBits) {
    const int shift = end > kDigitBits ? end - kDigitBits : 0;
    auto* const counts = reinterpret_cast<uint32_t*>(tile);
    block.sync();
    for (int i = block.thread(); i < kDigits; i += block.threads()) counts[i] = 0;
    block.sync();
    for_each_key<kDescending>(block, x, [&](int64_t, Key key) {
      if ((key & known) == digits) atomicAdd(&counts[(key >> shift) & (kDigits - 1)], 1u);
    });
    block.sync();
    sum_before(block, counts, kDigits);
    for (int i = block.thread(); i < kDigits; i += block.threads()) {
      const bool is_last = i + 1 == kDigits;
      if (counts[i] < left && (is_last || left <= counts[i + 1])) {
        digit = i, before_digit = counts[i];
        of_digit = is_last ? 0 : counts[i + 1] - counts[i];  // 0: unknown, because `counts` ends here
      }
    }
    block.sync();
    left -= before_digit;
    all = of_digit == left;
    digits |= Key(digit) << shift;
    known |= Key(kDigits - 1) << shift;
  }
  if (block.thread() == 0) taken = 0;
  block.sync();
  for_each_key<kDescending>(block, x, [&](int64_t i, Key key) {
    if ((key & known) < digits || (all && (key & known) == digits)) tile[atomicAdd(&taken, 1u)] = i;
  });
  if (all) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t share = (x.length + blockDim.x - 1) / blockDim.x * 32;
  const int64_t end = (warp + 1) * share < x.length ? (warp + 1) * share : x.length;
  const auto each_equal = [&](auto take) {
    for (int64_t first = warp * share; first < end; first += 32) {
      const int64_t i = first + lane;
      const bool is_equal = i < end && (sort_key<kDescending>(x[i]) & known) == digits;
      take(i, is_equal, __ballot_sync(~0u, is_equal));
    }
  };
  uint32_t count = 0;
  each_equal([&](int64_t, bool, unsigned equal) { count += __popc(equal); });
  if (lane == 0) of_warps[warp] = count;
  block.sync();
  int64_t before = length - left;
  for (int other = 0; other < warp; ++other) before += of_warps[other];
  each_equal([&](int64_t i, bool is_equal, unsigned equal) {
    const int64_t at = before + __popc(equal & ((1u << lane) - 1));
    if (is_equal && at < length) tile[at] = i;
    before += __popc(equal);
  });
}

// Widens n 32-bit indices in a half of `order` to 64 bits in place. The order of the rounds ensures that no
// index is overwritten before it is read.
__device__ inline void widen(int64_t* order, int64_t n, bool in_first_half) {
  const auto* const from = reinterpret_cast<const uint32_t*>(order) + (in_first_half ? 0 : n);
  const auto move = [&](int64_t begin, int64_t end) {
    const bool is_alone = end - begin <= kSorted;
    const int64_t block = is_alone ? 0 : Team::rank(), blocks = is_alone ? 1 : Team::size();
    if (is_alone && Team::rank() > 0) return;
    for (int64_t i = begin + blockDim.x * block + threadIdx.x; i < end; i += blockDim.x * blocks) {
      const uint32_t index = from[i];
      order[i] = index;
    }
    is_alone ? __syncthreads() : Team::meet();
  };
  if (in_first_half) {
    for (int64_t end = n; end > 0;) {
      const int64_t begin = end > 1 ? (end + 1) / 2 : 0;
      move(begin, end);
      end = begin;
    }
  } else {
    for (int64_t begin = 0; begin < n;) {
      const int64_t end = begin + 1 < n ? (n + begin) / 2 : n;
      move(begin, end);
      begin = end;
    }
  }
}

// Stable LSD radix sort of a long row. Each block owns a part of the row. Passes alternate between the halves of `order`, which
// hold 32-bit indices. A cooperative grid exchanges counts in the half that the pass writes afterwards.
template <bool kDescending, class T>
__device__ void order_long(BlockFibers block, Fiber<T> x, int64_t* order, uint64_t* tile) {
  using Key = decltype(sort_key<kDescending>(x[0]));
  constexpr int kDigits = 256, kEach = 4;
  __shared__ uint32_t counts[kDigits], begins[kDigits], of_tile[kDigits];
  __shared__ bool is_needed;
  auto* const of_warps = reinterpret_cast<uint16_t*>(tile);  // [warp][digit]
  const int64_t n = x.length, part = (n + Team::size() - 1) / Team::size(), begin = Team::rank() * part;
  const int64_t end = begin + part < n ? begin + part : n;
  auto *from = reinterpret_cast<uint32_t*>(order), *to = from + n;
  const int thread = block.thread(), threads = block.threads(), warp = thread / 32, lane = thread % 32, warps = threads / 32;
  for (int64_t i = begin + thread; i < end; i += threads) from[i] = static_cast<uint32_t>(i);
  for (int shift = 0; shift < static_cast<int>(sizeof(Key)) * 8; shift += 8) {
    const auto digit_of = [&](uint32_t index) {
      return static_cast<uint32_t>((sort_key<kDescending>(x[index]) >> shift) % kDigits);
    };
    for (int d = thread; d < kDigits; d += threads) counts[d] = 0;
    if (thread == 0) is_needed = true;
    block.sync();
    for (int64_t i = begin + thread; i < end; i += threads) atomicAdd(&counts[digit_of(from[i])], 1u);
    block.sync();
    for (int d = thread; Team::is_grid() && d < kDigits; d += threads) to[Team::rank() * kDigits + d] = counts[d];
    Team::meet();
    const auto add_counts = [&](auto count_of) {
      for (int d = thread; d < kDigits; d += threads) {
        uint32_t before = 0, all = 0;
#pragma unroll 16
        for (int other = 0; other < Team::size(); ++other) {
          const uint32_t count = count_of(other, d);
          before += other < Team::rank() ? count : 0;
          all += count;
        }
        begins[d] = all, of_tile[d] = before;
        if (all == n) is_needed = false;
      }
    };
    if (Team::is_grid()) {
      add_counts([&](int other, int d) { return to[other * kDigits + d]; });
    } else {
      add_counts([&](int other, int d) { return Cluster::of(other, counts[d]); });
    }
    Team::meet();  // All blocks have read the counts.
    const bool skips = !is_needed;
    block.sync();  // All threads have read `is_needed`.
    if (skips) continue;
    sum_before(block, begins, kDigits);
    for (int d = thread; d < kDigits; d += threads) begins[d] += of_tile[d];
    block.sync();
    for (int64_t first = begin; first < end; first += threads * kEach) {
      for (int i = thread; i < warps * kDigits; i += threads) of_warps[i] = 0;
      block.sync();
      uint32_t index[kEach], digit[kEach], rank[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t i = first + (warp * kEach + e) * 32 + lane;
        index[e] = i < end ? from[i] : 0;
        digit[e] = i < end ? digit_of(index[e]) : kDigits;
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const unsigned equal = __match_any_sync(~0u, digit[e]), before = __popc(equal & ((1u << lane) - 1));
        uint16_t* const own = &of_warps[warp * kDigits + digit[e] % kDigits];
        rank[e] = *own + before;
        __syncwarp();
        if (before == 0 && digit[e] < kDigits) *own += __popc(equal);
        __syncwarp();
      }
      block.sync();
      for (int d = thread; d < kDigits; d += threads) {
        uint32_t before = 0;
        for (int other = 0; other < warps; ++other) {
          const uint16_t count = of_warps[other * kDigits + d];
          of_warps[other * kDigits + d] = static_cast<uint16_t>(before);
          before += count;
        }
        of_tile[d] = before;
      }
      block.sync();
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (digit[e] < kDigits) to[begins[digit[e]] + of_warps[warp * kDigits + digit[e]] + rank[e]] = index[e];
      }
      block.sync();
      for (int d = thread; d < kDigits; d += threads) begins[d] += of_tile[d];
    }
    auto* const last = from;
    from = to, to = last;
    Team::meet();
  }
  widen(order, n, from < to);
}

// Stable argsort of x: computes all indices, or the first order.length <= kSorted indices.
template <bool kDescending, class T>
__device__ void argsort(BlockFibers block, Fiber<T> x, Fiber<int64_t> order) {
  __shared__ uint64_t tile[kSorted];
  using Key = decltype(sort_key<kDescending>(x[0]));
  constexpr bool kPacked = sizeof(Key) == 4;
  block.sync();  // Waits for the previous row.
  int count = x.length;
  if (x.length > kSorted) {
    if (order.length == x.length) return order_long<kDescending>(block, x, order.first, tile);
    if (Team::rank() > 0) return;  // One block selects the first elements.
    if constexpr (kPacked) {
      if (order.length <= block.threads() && order_few<kDescending>(block, x, order, tile)) return;
    }
    choose<kDescending>(block, x, order.length, tile);
    block.sync();
    count = order.length;
  }
  const auto key = [&](uint64_t i) { return sort_key<kDescending>(x[i]); };
  for (int i = block.thread(); i < count; i += block.threads()) {
    const int64_t index = x.length > kSorted ? tile[i] : i;
    if constexpr (kPacked) {
      tile[i] = packed(key(index), index);
    } else {
      tile[i] = index;
    }
  }
  sort_tile(block, tile, count, [&](uint64_t a, uint64_t b) {
    if constexpr (kPacked) {
      return a < b;
    } else {
      const Key key_a = key(a), key_b = key(b);
      return key_a < key_b || (key_a == key_b && a < b);
    }
  });
  for (int64_t i = block.thread(); i < order.length; i += block.threads()) {
    order[i] = kPacked ? static_cast<uint32_t>(tile[i]) : tile[i];
  }
}

#endif  // __CUDACC__

// Sorts with a max-heap of the first elements so far.
template <bool kDescending, class T>
HW_DEVICE void argsort(Fibers, Fiber<T> x, Fiber<int64_t> order) {
  const int64_t n = order.length;
  const auto comes_first = [&](int64_t a, int64_t b) {
    const auto key_a = sort_key<kDescending>(x[a]), key_b = sort_key<kDescending>(x[b]);
    return key_a < key_b || (key_a == key_b && a < b);
  };
  const auto sift = [&](int64_t node, int64_t end, int64_t index) {
    for (int64_t child; (child = 2 * node + 1) < end; node = child) {
      if (child + 1 < end && comes_first(order[child], order[child + 1])) ++child;
      if (!comes_first(index, order[child])) break;
      order[node] = order[child];
    }
    order[node] = index;
  };
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  for (int64_t node = n / 2; node-- > 0;) sift(node, n, order[node]);
  for (int64_t i = n; i < x.length; ++i) {
    if (comes_first(i, order[0])) sift(0, n, i);
  }
  for (int64_t end = n; end-- > 1;) {
    const int64_t index = order[end];
    order[end] = order[0];
    sift(0, end, index);
  }
}

}  // namespace hw
