#include "errors.h"

#include <algorithm>
#include <span>
#include <utility>

#include "machine.h"

namespace hostweave::cpu {
namespace {

// The text belongs to one code of one library; asked about another code, the plain name is the answer.
struct LastError {
  cudaError_t cuda = cudaSuccess, cuda_text_of = cudaSuccess;
  ncclResult_t nccl_text_of = ncclSuccess;
  cublasStatus_t blas_text_of = CUBLAS_STATUS_SUCCESS;
  std::string text;
};

LastError& last() {
  thread_local LastError error;
  return error;
}

LastError& fresh(std::string text) {
  LastError& e = last();
  e.cuda_text_of = cudaSuccess, e.nccl_text_of = ncclSuccess, e.blas_text_of = CUBLAS_STATUS_SUCCESS;
  e.text = std::move(text);
  return e;
}

template <class Code>
using Named = std::pair<Code, const char*>;

#define HW_NAMED(code) {code, #code}
constexpr Named<cudaError_t> kCudaErrors[] = {
    HW_NAMED(cudaSuccess),
    HW_NAMED(cudaErrorInvalidValue),
    HW_NAMED(cudaErrorMemoryAllocation),
    HW_NAMED(cudaErrorInitializationError),
    HW_NAMED(cudaErrorInvalidConfiguration),
    HW_NAMED(cudaErrorInvalidPitchValue),
    HW_NAMED(cudaErrorInvalidDevicePointer),
    HW_NAMED(cudaErrorInvalidMemcpyDirection),
    HW_NAMED(cudaErrorNoDevice),
    HW_NAMED(cudaErrorInvalidDevice),
    HW_NAMED(cudaErrorInvalidResourceHandle),
    HW_NAMED(cudaErrorNotReady),
    HW_NAMED(cudaErrorIllegalAddress),
    HW_NAMED(cudaErrorPeerAccessAlreadyEnabled),
    HW_NAMED(cudaErrorPeerAccessNotEnabled),
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
    HW_NAMED(CUBLAS_STATUS_SUCCESS),          HW_NAMED(CUBLAS_STATUS_NOT_INITIALIZED), HW_NAMED(CUBLAS_STATUS_ALLOC_FAILED),
    HW_NAMED(CUBLAS_STATUS_INVALID_VALUE),    HW_NAMED(CUBLAS_STATUS_ARCH_MISMATCH),   HW_NAMED(CUBLAS_STATUS_MAPPING_ERROR),
    HW_NAMED(CUBLAS_STATUS_EXECUTION_FAILED), HW_NAMED(CUBLAS_STATUS_INTERNAL_ERROR),  HW_NAMED(CUBLAS_STATUS_NOT_SUPPORTED),
    HW_NAMED(CUBLAS_STATUS_LICENSE_ERROR),
};
#undef HW_NAMED

template <class Code>
const char* name_in(std::span<const Named<Code>> known, Code code, const char* otherwise) {
  const auto found = std::ranges::find(known, code, &Named<Code>::first);
  return found == known.end() ? otherwise : found->second;
}
const char* plain(cudaError_t code) { return name_in<cudaError_t>(kCudaErrors, code, "cudaErrorUnknown"); }
const char* plain(ncclResult_t code) { return name_in<ncclResult_t>(kNcclResults, code, "unknown result code"); }
const char* plain(cublasStatus_t code) { return name_in<cublasStatus_t>(kBlasStatuses, code, "unknown cublas status"); }

std::string unsupported(const std::string& what) { return what + ": not supported by the CPU device"; }

}  // namespace

cudaError_t error(cudaError_t code, std::string text) {
  LastError& e = fresh(std::move(text));
  return e.cuda = e.cuda_text_of = code;
}
ncclResult_t error(ncclResult_t code, std::string text) { return fresh(std::move(text)).nccl_text_of = code; }
cublasStatus_t error(cublasStatus_t code, std::string text) { return fresh(std::move(text)).blas_text_of = code; }

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

const char* cudaGetErrorString(cudaError_t error) {
  const LastError& e = last();
  return error != cudaSuccess && e.cuda_text_of == error ? e.text.c_str() : plain(error);
}
cudaError_t cudaGetLastError(void) { return std::exchange(last().cuda, cudaSuccess); }

const char* ncclGetErrorString(ncclResult_t result) {
  const LastError& e = last();
  return result != ncclSuccess && e.nccl_text_of == result ? e.text.c_str() : plain(result);
}
const char* ncclGetLastError(ncclComm_t) { return last().text.c_str(); }

const char* cublasLtGetStatusString(cublasStatus_t status) {
  const LastError& e = last();
  return status != CUBLAS_STATUS_SUCCESS && e.blas_text_of == status ? e.text.c_str() : plain(status);
}

}  // extern "C"
