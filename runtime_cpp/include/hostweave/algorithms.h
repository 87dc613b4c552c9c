// Measured cuBLASLt algorithms, for programs with Options(tune=True).
#pragma once
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <string>

namespace hw {

// Cache of the selected algorithm of each problem. One rank measures, and all ranks of the process use the same algorithm. So
// equal operands give equal results on these ranks.
class Algorithms {
 public:
  // Returns the algorithm of a problem. If the problem is new, calls `measure`; other callers wait meanwhile. The pointer stays
  // valid.
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
  // Sets the algorithm of a problem, also in existing plans. Must not be called while a rank prepares or runs a program.
  void set(const std::string& problem, const cublasLtMatmulAlgo_t& algorithm) {
    const std::lock_guard lock(mutex_);
    known_[problem] = algorithm;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, cublasLtMatmulAlgo_t> known_;
};

Algorithms& measured_algorithms();

}  // namespace hw
