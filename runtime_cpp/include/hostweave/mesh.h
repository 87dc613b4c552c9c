// Meshes of some of a program's ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace hw {

// The place of a rank in a list of ranks, -1 where it is not there.
constexpr int64_t index_in(std::initializer_list<int64_t> ranks, int64_t rank) {
  const auto* const found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : found - ranks.begin();
}

}  // namespace hw
