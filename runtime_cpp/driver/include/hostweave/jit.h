// Kernels compiled by NVRTC (HOSTWEAVE_JIT) instead of nvcc. The symbol that program.cpp uses for a kernel is then a JitKernel,
// which holds the handle for CUDA launches, instead of a function.
#pragma once
#include <cuda_runtime_api.h>

namespace hw {

struct JitKernel {
  const void* cubin;
  const char* name;                // mangled
  const void* function = nullptr;  // null until loaded
};

// Loads the kernel on the current device. Thread-safe and idempotent.
cudaError_t load_kernel(JitKernel& kernel);

}  // namespace hw
