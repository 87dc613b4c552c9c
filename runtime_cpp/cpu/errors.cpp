#include "errors.h"

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

const char* plain(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError:
      return "cudaErrorInitializationError";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidPitchValue:
      return "cudaErrorInvalidPitchValue";
    case cudaErrorInvalidDevicePointer:
      return "cudaErrorInvalidDevicePointer";
    case cudaErrorInvalidMemcpyDirection:
      return "cudaErrorInvalidMemcpyDirection";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorPeerAccessAlreadyEnabled:
      return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorPeerAccessNotEnabled:
      return "cudaErrorPeerAccessNotEnabled";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    default:
      return "cudaErrorUnknown";
  }
}

const char* plain(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* plain(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "CUBLAS_STATUS_LICENSE_ERROR";
  }
  return "unknown cublas status";
}

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

const char* cudaGetErrorName(cudaError_t error) { return plain(error); }
const char* cudaGetErrorString(cudaError_t error) {
  const LastError& e = last();
  return error != cudaSuccess && e.cuda_text_of == error ? e.text.c_str() : plain(error);
}
cudaError_t cudaGetLastError(void) { return std::exchange(last().cuda, cudaSuccess); }
cudaError_t cudaPeekAtLastError(void) { return last().cuda; }

const char* ncclGetErrorString(ncclResult_t result) {
  const LastError& e = last();
  return result != ncclSuccess && e.nccl_text_of == result ? e.text.c_str() : plain(result);
}
const char* ncclGetLastError(ncclComm_t) { return last().text.c_str(); }

const char* cublasLtGetStatusName(cublasStatus_t status) { return plain(status); }
const char* cublasLtGetStatusString(cublasStatus_t status) {
  const LastError& e = last();
  return status != CUBLAS_STATUS_SUCCESS && e.blas_text_of == status ? e.text.c_str() : plain(status);
}

}  // extern "C"
