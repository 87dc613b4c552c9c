// Kernels that were compiled by NVRTC (HOSTWEAVE_JIT) instead of nvcc. Then the symbol by which program.cpp knows a kernel
// is not a function but a JitKernel, which holds the handle that CUDA launches.
#pragma once
#include <cuda_runtime_api.h>

namespace hw {

struct JitKernel {
  const void* cubin;
  const char* name;                // mangled
  const void* function = nullptr;  // null until it is loaded
};

// Loads the kernel on the current device. Any thread may call it, any number of times.
cudaError_t load_kernel(JitKernel& kernel);

}  // namespace hw
