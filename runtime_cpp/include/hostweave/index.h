// Integer division and remainder as mathematics has them, for operands that may be negative.
#pragma once
#include <cstdint>

namespace hw {

constexpr int64_t mod(int64_t a, int64_t n) { return (a % n + n) % n; }

constexpr int64_t floor_div(int64_t a, int64_t n) { return (a - mod(a, n)) / n; }

constexpr int64_t ceil_div(int64_t a, int64_t n) { return -floor_div(-a, n); }

}  // namespace hw
