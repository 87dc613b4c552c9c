// How ranks share a dim: blocks of one size, of which the last ranks have less or nothing where the size does not divide.
#pragma once
#include <algorithm>
#include <cstdint>

namespace hw {

// What each of `ranks` ranks holds of n indices, but for the last ones.
constexpr int64_t block(int64_t n, int64_t ranks) { return (n + ranks - 1) / ranks; }

// What the rank at `place` holds.
constexpr int64_t part(int64_t n, int64_t ranks, int64_t place) {
  return std::clamp<int64_t>(n - place * block(n, ranks), 0, block(n, ranks));
}

}  // namespace hw
