// Products of few rows for MatmulPlan, by kernels of few_rows.cu. The CPU device has none: there cuBLASLt's calls compute all.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "hostweave/products.h"

namespace hw {

// A product of any types that there are kernels for.
struct FewRowsProduct {
  FewRows<void, 1> operands;
  ProductEnd<void> end;
  bool transposed;
};

struct FewRowsKernels {
  cudaError_t (*load)();
  cudaError_t (*multiply)(const FewRowsProduct& product, cudaStream_t stream);
};

// The kernels for these types; null where there are none, or not for the current device.
const FewRowsKernels* few_rows_kernels(cudaDataType_t operands, cudaDataType_t result);

}  // namespace hw
