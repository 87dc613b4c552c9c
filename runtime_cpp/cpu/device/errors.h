// The last error of a thread, with a text that says more than its code.
#pragma once
#include <string>

#include "cublasLt.h"
#include "cuda_runtime_api.h"
#include "nccl.h"

namespace hostweave::cpu {

// Each keeps the text for this thread and returns the code.
cudaError_t error(cudaError_t code, std::string text);
ncclResult_t error(ncclResult_t code, std::string text);
cublasStatus_t error(cublasStatus_t code, std::string text);

cudaError_t cuda_not_supported(const std::string& what);
ncclResult_t nccl_not_supported(const std::string& what);
cublasStatus_t blas_not_supported(const std::string& what);

// For calls after a failure that stops all ranks: the code of each library for it, with the report.
cudaError_t cuda_stopped();
ncclResult_t nccl_stopped();
cublasStatus_t blas_stopped();

const std::string& last_error_text();

}  // namespace hostweave::cpu
