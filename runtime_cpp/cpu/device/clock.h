// Vector clocks: what is known to have happened before a point of a stream or of a rank's host threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hostweave::cpu {

// One counter for every stream and every device's host side ("lane"). A missing counter is zero.
class Clock {
 public:
  std::uint32_t at(std::size_t lane) const { return lane < counters_.size() ? counters_[lane] : 0; }
  std::uint32_t tick(std::size_t lane) {
    if (lane >= counters_.size()) counters_.resize(lane + 1);
    return ++counters_[lane];
  }
  void join(const Clock& other) {
    if (other.counters_.size() > counters_.size()) counters_.resize(other.counters_.size());
    for (std::size_t i = 0; i < other.counters_.size(); ++i) counters_[i] = std::max(counters_[i], other.counters_[i]);
  }

 private:
  std::vector<std::uint32_t> counters_;
};

using ClockSnapshot = std::shared_ptr<const Clock>;

}  // namespace hostweave::cpu
