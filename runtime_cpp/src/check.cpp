#include "hostweave/check.h"

#include <string>

#include "hostweave/errors.h"

namespace hw {
namespace {

[[noreturn]] void fail_with(std::string reason, const char* call, const char* file, int line) {
#ifdef HOSTWEAVE_CPU_DEVICE
  if (const char* report = hw_cpu_last_report(); *report) reason = report;
#endif
  if (reason.find("out of memory") != std::string::npos || reason.ends_with(" bytes left"))
    reason += "; free memory of the device, or pass smaller arrays";
  throw ExecutionError(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " + reason);
}

}  // namespace

void fail(cudaError_t error, const char* call, const char* file, int line) {
  fail_with(cudaGetErrorString(error), call, file, line);
}

void fail(ncclResult_t error, const char* call, const char* file, int line) {
  const std::string detail = ncclGetLastError(nullptr);
  fail_with(ncclGetErrorString(error) + (detail.empty() ? "" : ": " + detail), call, file, line);
}

void fail(cublasStatus_t error, const char* call, const char* file, int line) {
  fail_with(cublasLtGetStatusString(error), call, file, line);
}

}  // namespace hw
