// Algorithms of cuBLASLt that were measured, for programs that ask for that.
#pragma once
#include <cublasLt.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace hw {

// By problem. What one rank of the process has measured all of them take, so that equal operands have equal products everywhere.
class Algorithms {
 public:
  using Measure = std::function<cublasLtMatmulAlgo_t()>;

  // The algorithm of a problem, which `measure` finds where it is not known; who asks for one meanwhile waits. It stays where it
  // is.
  const cublasLtMatmulAlgo_t* find(const std::string& problem, const Measure& measure);

  std::map<std::string, cublasLtMatmulAlgo_t> known();
  // Also in place of what plans have already: for when no rank is preparing.
  void set(const std::string& problem, const cublasLtMatmulAlgo_t& algorithm);

 private:
  std::mutex mutex_;
  std::map<std::string, cublasLtMatmulAlgo_t> known_;
};

// Those of this process.
Algorithms& measured_algorithms();

}  // namespace hw
