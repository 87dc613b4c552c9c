// Kernels that NVRTC compiles (HOSTWEAVE_JIT) instead of nvcc. In program.cpp, the symbol of such a kernel is a JitKernel instead
// of a function. The JitKernel holds the handle for CUDA launches.
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
