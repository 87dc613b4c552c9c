// Matmuls with few rows for MatmulPlan, by the kernels of few_rows.cu. The CPU device has no such kernels.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>

#include "hostweave/products.h"

namespace hw {

// A matmul of any supported types.
struct FewRowsProduct {
  FewRows<void, 1> operands;
  ProductEnd<void> end;
  bool transposed;
  ProductScales scales;  // scales of 8-bit floats
};

struct FewRowsKernels {
  cudaError_t (*load)();
  cudaError_t (*multiply)(const FewRowsProduct& product, cudaStream_t stream);
};

// Kernels for these types; null if the current device has none.
const FewRowsKernels* few_rows_kernels(cudaDataType_t operands, cudaDataType_t result);

}  // namespace hw
