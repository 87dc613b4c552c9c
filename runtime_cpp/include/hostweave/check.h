// HW_CHECK(call) throws ExecutionError with file, line and call if a CUDA, NCCL or cuBLASLt call fails.
// The call log records the line of a call that succeeds.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "hostweave/call_log.h"
#include "hostweave/range.h"

#ifdef __FILE_NAME__
#define HW_FILE __FILE_NAME__
#else
#define HW_FILE __FILE__
#endif

#ifdef HOSTWEAVE_CPU_DEVICE  // Reports of the CPU device name the line of the call.
#include <hostweave_cpu.h>
#define HW_LOCATION(call) hw_cpu_location(HW_FILE, __LINE__, call)
#else  // The NVTX range ends with the statement.
#define HW_LOCATION(call) static_cast<void>(::hw::Range(call))
#endif

#define HW_CHECK(call) (HW_LOCATION(#call), ::hw::check((call), #call, HW_FILE, __LINE__))

namespace hw {

[[noreturn]] void fail(cudaError_t error, const char* call, const char* file, int line);
[[noreturn]] void fail(ncclResult_t error, const char* call, const char* file, int line);
[[noreturn]] void fail(cublasStatus_t error, const char* call, const char* file, int line);

template <class Status>  // 0 means success
void check(Status status, const char* call, const char* file, int line) {
  if (status != Status{}) [[unlikely]]
    fail(status, call, file, line);
  if (CallLog* const log = CallLog::current()) log->line(call, file, line);
}

}  // namespace hw
