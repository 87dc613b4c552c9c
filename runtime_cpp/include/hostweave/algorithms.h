// Algorithms of cuBLASLt that were measured, for programs that ask for that.
#pragma once
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <string>

namespace hw {

// By problem. What one rank of the process has measured all of them take, so that equal operands have equal products everywhere.
class Algorithms {
 public:
  // The algorithm of a problem, which `measure` finds where it is not known; who asks for one meanwhile waits. It stays where it
  // is.
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
  // Also in place of what plans have already: for when no rank is preparing.
  void set(const std::string& problem, const cublasLtMatmulAlgo_t& algorithm) {
    const std::lock_guard lock(mutex_);
    known_[problem] = algorithm;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, cublasLtMatmulAlgo_t> known_;
};

// Those of this process.
Algorithms& measured_algorithms();

}  // namespace hw
