// Measured cuBLASLt algorithms, for programs that enable tuning.
#pragma once
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <string>

namespace hw {

// Algorithm by problem. All ranks of the process use the algorithm that one of them has measured, so equal operands give equal
// results.
class Algorithms {
 public:
  // Returns the algorithm of a problem, calling `measure` if it is unknown. Concurrent callers wait. The pointer stays valid.
  template <class Measure>
  const cublasLtMatmulAlgo_t* find(const std::string& problem, const Measure& measure) {
    const std::lock_guard lock(mutex_);
    auto found = known_.find(problem);
    if (found == known_.end()) found = known_.emplace(problem, measure()).first;
    return &found->second;
  }

  std::map<std::string, cublasLtMatmulAlgo_t> known() {
    const std::lock_guard lock(mutex_);
    return known_;
  }
  // Replaces the algorithm, also in existing plans. Call it while no rank is preparing.
  void set(const std::string& problem, const cublasLtMatmulAlgo_t& algorithm) {
    const std::lock_guard lock(mutex_);
    known_[problem] = algorithm;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, cublasLtMatmulAlgo_t> known_;
};

// The algorithms of this process.
Algorithms& measured_algorithms();

}  // namespace hw
