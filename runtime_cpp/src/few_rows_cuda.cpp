#include "hostweave/few_rows_plan.h"
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace hw {

#define HW_PRODUCT(name, T, Result) __global__ void name(FewRows<T, 1> p, ProductEnd<Result> end);
#define HW_PRODUCTS(T, Result)                             \
  HW_PRODUCT(multiply_few_rows, T, Result)                 \
  HW_PRODUCT(multiply_few_rows_transposed, T, Result)      \
  HW_PRODUCT(multiply_few_rows_by_large_blocks, T, Result) \
  HW_PRODUCT(multiply_few_rows_transposed_by_large_blocks, T, Result)

HW_PRODUCTS(bf16, bf16)
HW_PRODUCTS(bf16, float)
HW_PRODUCTS(f16, f16)
HW_PRODUCTS(f16, float)
HW_PRODUCTS(float, float)

namespace {

template <class T, class Result>
struct Kernels {
  using Kernel = void (*)(FewRows<T, 1>, ProductEnd<Result>);

  static Kernel kernel(bool transposed, int threads) {
    const Kernel of_blocks[2][2] = {{multiply_few_rows, multiply_few_rows_transposed},
                                    {multiply_few_rows_by_large_blocks, multiply_few_rows_transposed_by_large_blocks}};
    return of_blocks[threads == kLargeProductThreads][transposed];
  }
  static cudaError_t load() {
    for (const bool transposed : {false, true}) {
      for (const int threads : {kProductThreads, kLargeProductThreads}) {
        if (const cudaError_t status = hw::load(kernel(transposed, threads)); status != cudaSuccess) return status;
      }
    }
    return cudaSuccess;
  }
  static cudaError_t multiply(const FewRowsProduct& product, cudaStream_t stream) {
    const auto& [rows, depth, columns, x, x_pitch, weights, pitch] = product.operands;
    const auto& [result, result_pitch, scale, accumulate, bias, activation] = product.end;
    const Grid grid = grid_of_product(columns, depth);
    const FewRows<T, 1> p{rows, depth, columns, static_cast<const T*>(x), x_pitch, {static_cast<const T*>(weights[0])}, pitch};
    const auto of_result = [](const void* pointer) { return static_cast<const Result*>(pointer); };
    const ProductEnd<Result> end{static_cast<Result*>(result), result_pitch,    scale,
                                 of_result(accumulate),        of_result(bias), activation};
    return launch_pdl(kernel(product.transposed, grid.threads), grid, stream, p, end);
  }
  static constexpr FewRowsKernels kTable{load, multiply};
};

}  // namespace

const FewRowsKernels* few_rows_kernels(cudaDataType_t operands, cudaDataType_t result) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return nullptr;
  if (major < 8) return nullptr;  // tensor cores lack bf16
  if (operands == CUDA_R_16BF && result == CUDA_R_16BF) return &Kernels<bf16, bf16>::kTable;
  if (operands == CUDA_R_16BF && result == CUDA_R_32F) return &Kernels<bf16, float>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_16F) return &Kernels<f16, f16>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_32F) return &Kernels<f16, float>::kTable;
  if (operands == CUDA_R_32F && result == CUDA_R_32F) return &Kernels<float, float>::kTable;
  return nullptr;
}

}  // namespace hw
