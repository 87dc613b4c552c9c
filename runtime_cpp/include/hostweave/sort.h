// The order of a lane's elements, or of the first ones in it alone.
#pragma once
#include "hostweave/lanes.h"

#ifndef __CUDACC__
#include <algorithm>
#include <numeric>
#include <vector>
#endif

namespace hw {

template <int kBytes>
struct KeyOf {
  using Type = uint32_t;
};
template <>
struct KeyOf<8> {
  using Type = uint64_t;
};

// A number that is smaller for what goes before. A NaN counts as the largest element, and zeros are equal.
template <bool kDescending, class T>
HW_DEVICE auto sort_key(T element) {
  const auto x = accumulated(element);
  using X = decltype(accumulated(element));
  using Key = typename KeyOf<sizeof(X)>::Type;
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
// A sorting network in which the smaller of two goes to the smaller place: what is past the end would stay there (Batcher,
// "Sorting networks and their applications", 1968). put(i, other) orders two.
template <class Put>
__device__ void step(BlockLanes block, int64_t n, int64_t flips, Put put) {
  block.sync();
  for (int64_t i = block.thread(); i < n; i += block.threads()) {
    if (const int64_t other = i ^ flips; other > i && other < n) put(i, other);
  }
}

// Makes runs of `length` of those of half of it, but for the steps of smaller distances.
template <class Put>
__device__ void merge(BlockLanes block, int64_t n, int64_t length, int64_t least_distance, Put put) {
  step(block, n, length - 1, put);
  for (int64_t distance = length / 4; distance >= least_distance; distance /= 2) step(block, n, distance, put);
}

// Orders numbers: in shared memory where all steps are within a tile.
__device__ inline void sort_numbers(BlockLanes block, uint64_t* numbers, int64_t n) {
  constexpr int64_t kTileNumbers = 2048;
  __shared__ uint64_t tile[kTileNumbers];
  const auto put_in = [](uint64_t* x) {
    return [x](int64_t i, int64_t other) {
      const uint64_t a = x[i], b = x[other];
      if (b < a) x[i] = b, x[other] = a;
    };
  };
  const auto in_tiles = [&](auto steps) {
    for (int64_t begin = 0; begin < n; begin += kTileNumbers) {
      const int64_t count = n - begin < kTileNumbers ? n - begin : kTileNumbers;
      block.sync();
      for (int64_t i = block.thread(); i < count; i += block.threads()) tile[i] = numbers[begin + i];
      steps(count);
      block.sync();
      for (int64_t i = block.thread(); i < count; i += block.threads()) numbers[begin + i] = tile[i];
    }
  };
  in_tiles([&](int64_t count) {
    for (int64_t length = 2; length / 2 < count; length *= 2) merge(block, count, length, 1, put_in(tile));
  });
  for (int64_t length = 2 * kTileNumbers; length / 2 < n; length *= 2) {
    merge(block, n, length, kTileNumbers, put_in(numbers));
    in_tiles([&](int64_t count) {
      for (int64_t distance = kTileNumbers / 2; distance > 0; distance /= 2) step(block, count, distance, put_in(tile));
    });
  }
  block.sync();
}

// Calls take(i, key) for all elements, of which a thread loads several at once.
template <class KeyAt, class Take>
__device__ void for_each_key(BlockLanes block, int64_t n, KeyAt key, Take take) {
  constexpr int kAtOnce = 8;
  int64_t i = block.thread();
  for (; i + (kAtOnce - 1) * block.threads() < n; i += kAtOnce * block.threads()) {
    decltype(key(i)) keys[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) keys[j] = key(i + j * block.threads());
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) take(i + j * block.threads(), keys[j]);
  }
  for (; i < n; i += block.threads()) take(i, key(i));
}

// Of those elements whose digits so far are `digits`, where `known` has a bit, so many are among the first; all, or not.
template <class Key>
struct Choice {
  Key digits, known;
  int64_t left;
  bool all;
};

// The last of the first `left` elements, digit by digit from the top: how many have each one says which is its own.
template <class Key, class KeyAt>
__device__ Choice<Key> last_of(BlockLanes block, int64_t n, KeyAt key, int64_t left) {
  constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
  __shared__ uint32_t counts[kDigits];
  __shared__ int64_t digit, before_digit, of_digit;
  Choice<Key> choice{0, 0, left, false};
  for (int end = sizeof(Key) * 8; end > 0 && !choice.all; end -= kDigitBits) {
    const int shift = end > kDigitBits ? end - kDigitBits : 0;
    for (int64_t i = block.thread(); i < kDigits; i += block.threads()) counts[i] = 0;
    block.sync();
    for_each_key(block, n, key, [&](int64_t, Key own) {
      if ((own & choice.known) == choice.digits) atomicAdd(&counts[(own >> shift) & (kDigits - 1)], 1u);
    });
    block.sync();
    int64_t before = 0;
    for (int64_t first = 0; first < kDigits; first += block.threads()) {
      const int64_t i = first + block.thread(), count = i < kDigits ? counts[i] : 0;
      int64_t all;
      const int64_t so_far = before + sums_so_far(block, count, all);
      if (so_far - count < choice.left && choice.left <= so_far) digit = i, before_digit = so_far - count, of_digit = count;
      before += all;
    }
    block.sync();
    choice.left -= before_digit;
    choice.all = of_digit == choice.left;
    choice.digits |= Key(digit) << shift;
    choice.known |= Key(kDigits - 1) << shift;
  }
  return choice;
}

// The indices of the first elements, in any order; of equal ones those before.
template <class KeyAt>
__device__ void choose(BlockLanes block, int64_t n, KeyAt key, Lane<int64_t> order) {
  using Key = decltype(key(n));
  __shared__ uint32_t taken;
  __shared__ int64_t of_warps[32];  // equal ones
  const auto choice = last_of<Key>(block, n, key, order.length);
  if (block.thread() == 0) taken = 0;
  block.sync();
  for_each_key(block, n, key, [&](int64_t i, Key own) {
    own &= choice.known;
    if (own < choice.digits || (choice.all && own == choice.digits)) order[atomicAdd(&taken, 1u)] = i;
  });
  if (choice.all) return;
  const int warp = threadIdx.x / 32, place = threadIdx.x % 32;
  const int64_t share = (n + blockDim.x - 1) / blockDim.x * 32, end = (warp + 1) * share < n ? (warp + 1) * share : n;
  const auto each_equal = [&](auto take) {
    for (int64_t first = warp * share; first < end; first += 32) {
      const int64_t i = first + place;
      const bool is_equal = i < end && (key(i) & choice.known) == choice.digits;
      take(i, is_equal, __ballot_sync(~0u, is_equal));
    }
  };
  int64_t before = 0;
  each_equal([&](int64_t, bool, unsigned equal) { before += __popc(equal); });
  if (place == 0) of_warps[warp] = before;
  block.sync();
  before = order.length - choice.left;
  for (int other = 0; other < warp; ++other) before += of_warps[other];
  each_equal([&](int64_t i, bool is_equal, unsigned equal) {
    const int64_t at = before + __popc(equal & ((1u << place) - 1));
    if (is_equal && at < order.length) order[at] = i;
    before += __popc(equal);
  });
}

// The indices of x in the order of its elements, of equal ones in their own: as many as `order` takes.
template <bool kDescending, class T>
__device__ void argsort(BlockLanes block, Lane<T> x, Lane<int64_t> order) {
  const auto key = [&](int64_t i) { return sort_key<kDescending>(x[i]); };
  const auto each = [&](auto write) {
    block.sync();
    for (int64_t i = block.thread(); i < order.length; i += block.threads()) order[i] = write(i);
  };
  if (order.length < x.length) {
    choose(block, x.length, key, order);
  } else {
    each([](int64_t i) { return i; });
  }
  if constexpr (sizeof(key(0)) == 4) {
    each([&](int64_t i) { return static_cast<int64_t>(uint64_t{key(order[i])} << 32 | static_cast<uint64_t>(order[i])); });
    sort_numbers(block, reinterpret_cast<uint64_t*>(order.first), order.length);
    each([&](int64_t i) { return order[i] & 0xffffffff; });
  } else {
    for (int64_t length = 2; length / 2 < order.length; length *= 2) {
      merge(block, order.length, length, 1, [&](int64_t i, int64_t other) {
        const int64_t a = order[i], b = order[other];
        const auto key_a = key(a), key_b = key(b);
        if (key_b < key_a || (key_b == key_a && b < a)) order[i] = b, order[other] = a;
      });
    }
  }
  block.sync();
}

// By a heap of the first ones so far, of which the root comes last.
template <bool kDescending, class T>
__device__ void argsort(Lanes, Lane<T> x, Lane<int64_t> order) {
  const int64_t n = order.length;
  const auto comes_first = [&](int64_t a, int64_t b) {
    const auto key_a = sort_key<kDescending>(x[a]), key_b = sort_key<kDescending>(x[b]);
    return key_a < key_b || (key_a == key_b && a < b);
  };
  const auto sift = [&](int64_t place, int64_t end, int64_t index) {
    for (int64_t child; (child = 2 * place + 1) < end; place = child) {
      if (child + 1 < end && comes_first(order[child], order[child + 1])) ++child;
      if (!comes_first(index, order[child])) break;
      order[place] = order[child];
    }
    order[place] = index;
  };
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  for (int64_t place = n / 2; place-- > 0;) sift(place, n, order[place]);
  for (int64_t i = n; i < x.length; ++i) {
    if (comes_first(i, order[0])) sift(0, n, i);
  }
  for (int64_t end = n; end-- > 1;) {
    const int64_t index = order[end];
    order[end] = order[0];
    sift(0, end, index);
  }
}
#else
template <bool kDescending, class T>
void argsort(Lanes, Lane<T> x, Lane<int64_t> order) {
  std::vector<int64_t> indices(x.length);
  std::iota(indices.begin(), indices.end(), int64_t{0});
  const auto end = indices.begin() + order.length;
  std::partial_sort(indices.begin(), end, indices.end(), [&](int64_t a, int64_t b) {
    const auto key_a = sort_key<kDescending>(x[a]), key_b = sort_key<kDescending>(x[b]);
    return key_a < key_b || (key_a == key_b && a < b);
  });
  for (int64_t i = 0; i < order.length; ++i) order[i] = indices[i];
}
#endif

}  // namespace hw
