// How ranks share a dim: each holds ceil(n / ranks) indices, but for the last ones, which hold less or nothing.
#pragma once
#include <cstdint>

#include "hostweave/index.h"

namespace hw {

// The first index that the rank at `rank_in_group` holds of n.
constexpr int64_t local_begin(int64_t n, int64_t ranks, int64_t rank_in_group) {
  return smaller(rank_in_group * ceil_div(n, ranks), n);
}

// What the rank at `rank_in_group` holds of n indices.
constexpr int64_t local_size(int64_t n, int64_t ranks, int64_t rank_in_group) {
  return clamped(n - rank_in_group * ceil_div(n, ranks), 0, ceil_div(n, ranks));
}

}  // namespace hw
