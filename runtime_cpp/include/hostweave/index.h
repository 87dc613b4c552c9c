// Integer division and remainder as mathematics has them, for operands that may be negative, and indices that are out of range.
#pragma once
#include <cstdint>

namespace hw {

constexpr int64_t mod(int64_t a, int64_t n) { return (a % n + n) % n; }

constexpr int64_t floor_div(int64_t a, int64_t n) { return (a - mod(a, n)) / n; }

constexpr int64_t ceil_div(int64_t a, int64_t n) { return -floor_div(-a, n); }

// std::min and std::clamp, but that <algorithm> takes a compiler as long as the rest of a small program.
constexpr int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }
constexpr int64_t clamped(int64_t i, int64_t low, int64_t high) { return i < low ? low : smaller(i, high); }

// Throws std::out_of_range for an index that is negative, or not below n: the CPU device has it.
[[noreturn]] void index_out_of_range(bool negative, uint64_t index, int64_t n);

}  // namespace hw
