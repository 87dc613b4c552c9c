// Last error of each thread, with a detailed text.
#pragma once
#include <string>

#include "cublasLt.h"
#include "cuda_runtime_api.h"
#include "nccl.h"

namespace hostweave::cpu {

// These functions store the text for this thread and return the code.
cudaError_t error(cudaError_t code, std::string text);
ncclResult_t error(ncclResult_t code, std::string text);
cublasStatus_t error(cublasStatus_t code, std::string text);

// Returns an error such as "call: peer 9 of 8" unless 0 <= number < count.
template <class Code>
Code expect_below(int count, const char* what, int number, const std::string& call, Code otherwise) {
  if (number >= 0 && number < count) return Code{};
  return error(otherwise, call + ": " + what + " " + std::to_string(number) + " of " + std::to_string(count));
}

cudaError_t cuda_not_supported(const std::string& what);
ncclResult_t nccl_not_supported(const std::string& what);
cublasStatus_t blas_not_supported(const std::string& what);

// Errors for calls after a failure. A failure stops all ranks. The text of these errors is the report of the failure.
cudaError_t cuda_stopped();
ncclResult_t nccl_stopped();
cublasStatus_t blas_stopped();

const std::string& last_error_text();

}  // namespace hostweave::cpu
