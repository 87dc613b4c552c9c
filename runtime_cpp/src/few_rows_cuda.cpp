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

#define HW_SCALED_PRODUCT(name, Result) __global__ void name(FewRows<f8e4m3, 1> p, ProductScales scales, ProductEnd<Result> end);
#define HW_SCALED_PRODUCTS(Result)                                              \
  HW_SCALED_PRODUCT(multiply_few_scaled_rows, Result)                           \
  HW_SCALED_PRODUCT(multiply_few_scaled_rows_by_large_blocks, Result)           \
  HW_SCALED_PRODUCT(multiply_few_rows_of_scaled_blocks, Result)                 \
  HW_SCALED_PRODUCT(multiply_few_rows_of_scaled_blocks_by_large_blocks, Result) \
  HW_SCALED_PRODUCT(multiply_16_scaled_rows, Result)                            \
  HW_SCALED_PRODUCT(multiply_16_rows_of_scaled_blocks, Result)

HW_SCALED_PRODUCTS(bf16)
HW_SCALED_PRODUCTS(f16)
HW_SCALED_PRODUCTS(float)

namespace {

template <class T>
FewRows<T, 1> operands_of(const FewRowsProduct& product) {
  const auto& [rows, depth, columns, x, x_pitch, weights, pitch] = product.operands;
  return {rows, depth, columns, static_cast<const T*>(x), x_pitch, {static_cast<const T*>(weights[0])}, pitch};
}

template <class Result>
ProductEnd<Result> end_of(const FewRowsProduct& product) {
  const auto& [result, pitch, scale, accumulate, bias, activation] = product.end;
  const auto of_result = [](const void* pointer) { return static_cast<const Result*>(pointer); };
  return {static_cast<Result*>(result), pitch, scale, of_result(accumulate), of_result(bias), activation};
}

template <class T, class Result>
struct Kernels {
  using Kernel = void (*)(FewRows<T, 1>, ProductEnd<Result>);
  static constexpr Kernel kKernels[] = {multiply_few_rows, multiply_few_rows_transposed, multiply_few_rows_by_large_blocks,
                                        multiply_few_rows_transposed_by_large_blocks};

  static cudaError_t load() { return load_all(kKernels); }
  static cudaError_t multiply(const FewRowsProduct& product, cudaStream_t stream) {
    const Grid grid = grid_of_product(product.operands.columns, product.operands.depth);
    const Kernel kernel = kKernels[2 * (grid.threads == kLargeProductThreads) + product.transposed];
    return launch_pdl(kernel, grid, stream, operands_of<T>(product), end_of<Result>(product));
  }
  static constexpr FewRowsKernels kTable{load, multiply};
};

template <class Result>
struct ScaledKernels {
  using Kernel = void (*)(FewRows<f8e4m3, 1>, ProductScales, ProductEnd<Result>);
  static constexpr Kernel kKernels[] = {multiply_few_scaled_rows,
                                        multiply_few_rows_of_scaled_blocks,
                                        multiply_few_scaled_rows_by_large_blocks,
                                        multiply_few_rows_of_scaled_blocks_by_large_blocks,
                                        multiply_16_scaled_rows,
                                        multiply_16_rows_of_scaled_blocks};

  static cudaError_t load() { return load_all(kKernels); }
  static cudaError_t multiply(const FewRowsProduct& product, cudaStream_t stream) {
    const auto& [rows, depth, columns, x, x_pitch, weights, pitch] = product.operands;
    const bool of_blocks = product.scales.x.block_step != 0, many = rows > kFewRows;
    const Grid grid = many ? grid_of_products<kProductThreads, 2>(columns, depth) : grid_of_product(columns, depth);
    const Kernel kernel = kKernels[2 * (many ? 2 : grid.threads == kLargeProductThreads) + of_blocks];
    return launch_pdl(kernel, grid, stream, operands_of<f8e4m3>(product), product.scales, end_of<Result>(product));
  }
  static constexpr FewRowsKernels kTable{load, multiply};
};

}  // namespace

const FewRowsKernels* few_rows_kernels(cudaDataType_t operands, cudaDataType_t result) {
  if (attribute_of_device(cudaDevAttrComputeCapabilityMajor) < 8) return nullptr;  // Tensor cores of older GPUs lack bf16.
  if (operands == CUDA_R_16BF && result == CUDA_R_16BF) return &Kernels<bf16, bf16>::kTable;
  if (operands == CUDA_R_16BF && result == CUDA_R_32F) return &Kernels<bf16, float>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_16F) return &Kernels<f16, f16>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_32F) return &Kernels<f16, float>::kTable;
  if (operands == CUDA_R_32F && result == CUDA_R_32F) return &Kernels<float, float>::kTable;
  if (operands == CUDA_R_8F_E4M3 && result == CUDA_R_16BF) return &ScaledKernels<bf16>::kTable;
  if (operands == CUDA_R_8F_E4M3 && result == CUDA_R_16F) return &ScaledKernels<f16>::kTable;
  if (operands == CUDA_R_8F_E4M3 && result == CUDA_R_32F) return &ScaledKernels<float>::kTable;
  return nullptr;
}

}  // namespace hw
