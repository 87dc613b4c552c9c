#include "errors.h"

#include <algorithm>
#include <span>
#include <utility>
#include <variant>

#include "machine.h"

namespace hostweave::cpu {
namespace {

using AnyCode = std::variant<cudaError_t, ncclResult_t, cublasStatus_t>;

// Last error of a thread. `text` describes the error with code `text_of`. Other codes have fixed texts.
struct LastError {
  cudaError_t cuda = cudaSuccess;
  AnyCode text_of;
  std::string text;
};

LastError& last() {
  thread_local LastError error;
  return error;
}

template <class Code>
Code keep(Code code, std::string text) {
  last().text_of = code;
  last().text = std::move(text);
  return code;
}

template <class Code>
using Named = std::pair<Code, const char*>;

#define HW_NAMED(code) {code, #code}
constexpr Named<cudaError_t> kCudaErrors[] = {
    HW_NAMED(cudaSuccess),
    HW_NAMED(cudaErrorInvalidValue),
    HW_NAMED(cudaErrorMemoryAllocation),
    HW_NAMED(cudaErrorInvalidPitchValue),
    HW_NAMED(cudaErrorInvalidMemcpyDirection),
    HW_NAMED(cudaErrorInvalidDevice),
    HW_NAMED(cudaErrorInvalidResourceHandle),
    HW_NAMED(cudaErrorNotReady),
    HW_NAMED(cudaErrorPeerAccessAlreadyEnabled),
    HW_NAMED(cudaErrorLaunchFailure),
    HW_NAMED(cudaErrorIllegalState),
    HW_NAMED(cudaErrorNotSupported),
    HW_NAMED(cudaErrorStreamCaptureUnsupported),
    HW_NAMED(cudaErrorStreamCaptureInvalidated),
    HW_NAMED(cudaErrorStreamCaptureMerge),
    HW_NAMED(cudaErrorStreamCaptureUnmatched),
    HW_NAMED(cudaErrorStreamCaptureUnjoined),
    HW_NAMED(cudaErrorStreamCaptureIsolation),
    HW_NAMED(cudaErrorCapturedEvent),
};
constexpr Named<ncclResult_t> kNcclResults[] = {
    {ncclSuccess, "no error"},
    {ncclUnhandledCudaError, "unhandled cuda error"},
    {ncclSystemError, "unhandled system error"},
    {ncclInternalError, "internal error"},
    {ncclInvalidArgument, "invalid argument"},
    {ncclInvalidUsage, "invalid usage"},
    {ncclRemoteError, "remote process exited or there was a network error"},
    {ncclInProgress, "NCCL operation in progress"},
};
constexpr Named<cublasStatus_t> kBlasStatuses[] = {
    HW_NAMED(CUBLAS_STATUS_SUCCESS),       HW_NAMED(CUBLAS_STATUS_NOT_INITIALIZED),  HW_NAMED(CUBLAS_STATUS_ALLOC_FAILED),
    HW_NAMED(CUBLAS_STATUS_INVALID_VALUE), HW_NAMED(CUBLAS_STATUS_EXECUTION_FAILED), HW_NAMED(CUBLAS_STATUS_NOT_SUPPORTED),
};
#undef HW_NAMED

template <class Code>
const char* text_of(Code code, std::span<const Named<Code>> known, const char* otherwise) {
  if (code != Code{} && last().text_of == AnyCode(code)) return last().text.c_str();
  const auto found = std::ranges::find(known, code, &Named<Code>::first);
  return found == known.end() ? otherwise : found->second;
}

std::string unsupported(const std::string& what) { return what + ": not supported by the CPU device"; }

}  // namespace

cudaError_t error(cudaError_t code, std::string text) { return last().cuda = keep(code, std::move(text)); }
ncclResult_t error(ncclResult_t code, std::string text) { return keep(code, std::move(text)); }
cublasStatus_t error(cublasStatus_t code, std::string text) { return keep(code, std::move(text)); }

cudaError_t cuda_not_supported(const std::string& what) { return error(cudaErrorNotSupported, unsupported(what)); }
ncclResult_t nccl_not_supported(const std::string& what) { return error(ncclInvalidUsage, unsupported(what)); }
cublasStatus_t blas_not_supported(const std::string& what) { return error(CUBLAS_STATUS_NOT_SUPPORTED, unsupported(what)); }

cudaError_t cuda_stopped() { return error(cudaErrorLaunchFailure, Machine::get().report()); }
ncclResult_t nccl_stopped() { return error(ncclRemoteError, Machine::get().report()); }
cublasStatus_t blas_stopped() { return error(CUBLAS_STATUS_EXECUTION_FAILED, Machine::get().report()); }

const std::string& last_error_text() { return last().text; }

}  // namespace hostweave::cpu

using namespace hostweave::cpu;

extern "C" {

const char* cudaGetErrorString(cudaError_t error) { return text_of<cudaError_t>(error, kCudaErrors, "cudaErrorUnknown"); }
cudaError_t cudaGetLastError(void) { return std::exchange(last().cuda, cudaSuccess); }

const char* ncclGetErrorString(ncclResult_t result) { return text_of<ncclResult_t>(result, kNcclResults, "unknown result code"); }
const char* ncclGetLastError(ncclComm_t) { return last().text.c_str(); }

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return text_of<cublasStatus_t>(status, kBlasStatuses, "unknown cublas status");
}

}  // extern "C"
