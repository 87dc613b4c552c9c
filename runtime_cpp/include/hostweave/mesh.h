// Meshes of some of a program's ranks.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace hw {

// The place of a rank in a list of ranks, -1 where it is not there.
constexpr int64_t index_in(std::initializer_list<int64_t> ranks, int64_t rank) {
  int64_t place = 0;
  for (const int64_t each : ranks) {
    if (each == rank) return place;
    ++place;
  }
  return -1;
}

}  // namespace hw
