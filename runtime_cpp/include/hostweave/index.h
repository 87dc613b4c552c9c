// Integer helpers: floor division and modulo, index checks, and sharding of a dim. Each rank holds ceil(n / ranks) of n indices;
// the last ranks may hold fewer or none.
#pragma once
#include <cstdint>

namespace hw {

constexpr int64_t mod(int64_t a, int64_t n) { return (a % n + n) % n; }

constexpr int64_t floor_div(int64_t a, int64_t n) { return (a - mod(a, n)) / n; }

constexpr int64_t ceil_div(int64_t a, int64_t n) { return -floor_div(-a, n); }

// std::min and std::clamp, without the compile time of <algorithm>.
constexpr int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }
constexpr int64_t clamped(int64_t i, int64_t low, int64_t high) { return i < low ? low : smaller(i, high); }

// First index that the rank at `rank_in_group` holds, or n if the rank holds none.
constexpr int64_t local_begin(int64_t n, int64_t ranks, int64_t rank_in_group) {
  return smaller(rank_in_group * ceil_div(n, ranks), n);
}

// Number of indices that the rank at `rank_in_group` holds.
constexpr int64_t local_size(int64_t n, int64_t ranks, int64_t rank_in_group) {
  return clamped(n - rank_in_group * ceil_div(n, ranks), 0, ceil_div(n, ranks));
}

// Position of a rank in a list, or -1.
template <int n>
constexpr int64_t index_in(const int64_t (&ranks)[n], int64_t rank) {
  for (int position = 0; position < n; ++position) {
    if (ranks[position] == rank) return position;
  }
  return -1;
}

// Throws std::out_of_range for an invalid index, on the CPU device.
[[noreturn]] void index_out_of_range(bool negative, uint64_t index, int64_t n);

}  // namespace hw
