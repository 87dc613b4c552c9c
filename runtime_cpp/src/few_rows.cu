// Kernels of plans for matmuls with few rows.
#include "hostweave/few_rows.h"

namespace hw {

__device__ float activated(float x, Activation activation) {
  if (activation == Activation::relu) return Maximum()(x, 0.0f);
  if (activation == Activation::gelu_tanh) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  return x;
}

template <class Result>
__device__ void store(float sum, int64_t i, int64_t j, const ProductEnd<Result>& end) {
  const int64_t at = i * end.pitch + j;
  sum *= end.scale;
  if (end.accumulate) sum += static_cast<float>(end.accumulate[at]);
  if (end.bias) sum += static_cast<float>(end.bias[j]);
  end.result[at] = static_cast<Result>(activated(sum, end.activation));
}

template <bool kTransposed, int kThreads, class T, class Result>
__device__ void multiply(const FewRows<T, 1>& p, const ProductEnd<Result>& end) {
  few_rows<kTransposed, kThreads>(p, [&](int64_t i, int64_t j, const float (&sums)[1]) { store(sums[0], i, j, end); });
}

template <bool kOfBlocks, int kThreads, int kGroups, class T, class Result>
__device__ void multiply(const FewRows<T, 1>& p, const ProductScales& scales, const ProductEnd<Result>& end) {
  const auto finish = [&](int64_t i, int64_t j, const float (&sums)[1]) {
    store(kOfBlocks ? sums[0] : sums[0] * scales.x.of(i, 0) * scales.weights.of(j, 0), i, j, end);
  };
  few_rows<true, kThreads, kOfBlocks, kGroups>(p, finish, scales);
}

// Macros define the kernels, because nvcc does not export template instances to other files.
#define HW_PRODUCT(name, T, Result, kTransposed, kThreads)                                                                     \
  __global__ void __launch_bounds__(kThreads, kLargeProductThreads / kThreads) name(FewRows<T, 1> p, ProductEnd<Result> end) { \
    multiply<kTransposed, kThreads>(p, end);                                                                                   \
  }
#define HW_PRODUCTS(T, Result)                                     \
  HW_PRODUCT(multiply_few_rows, T, Result, false, kProductThreads) \
  HW_PRODUCT(multiply_few_rows_transposed, T, Result, true, kProductThreads)
// Large blocks have separate kernels, because more shared memory would leave less L1 cache to the other kernels.
#define HW_LARGE_PRODUCTS(T, Result)                                                    \
  HW_PRODUCT(multiply_few_rows_by_large_blocks, T, Result, false, kLargeProductThreads) \
  HW_PRODUCT(multiply_few_rows_transposed_by_large_blocks, T, Result, true, kLargeProductThreads)

#define HW_SCALED_PRODUCT(name, T, Result, kOfBlocks, kThreads, kGroups)                         \
  __global__ void __launch_bounds__(kThreads, kGroups > 1 ? 1 : kLargeProductThreads / kThreads) \
      name(FewRows<T, 1> p, ProductScales scales, ProductEnd<Result> end) {                      \
    multiply<kOfBlocks, kThreads, kGroups>(p, scales, end);                                      \
  }
#define HW_SCALED_PRODUCTS(T, Result)                                                                    \
  HW_SCALED_PRODUCT(multiply_few_scaled_rows, T, Result, false, kProductThreads, 1)                      \
  HW_SCALED_PRODUCT(multiply_few_scaled_rows_by_large_blocks, T, Result, false, kLargeProductThreads, 1) \
  HW_SCALED_PRODUCT(multiply_16_scaled_rows, T, Result, false, kProductThreads, 2)
#define HW_PRODUCTS_OF_BLOCKS(T, Result)                                                                          \
  HW_SCALED_PRODUCT(multiply_few_rows_of_scaled_blocks, T, Result, true, kProductThreads, 1)                      \
  HW_SCALED_PRODUCT(multiply_few_rows_of_scaled_blocks_by_large_blocks, T, Result, true, kLargeProductThreads, 1) \
  HW_SCALED_PRODUCT(multiply_16_rows_of_scaled_blocks, T, Result, true, kProductThreads, 2)

// Each paragraph below is compiled separately.

HW_PRODUCTS(bf16, bf16)

HW_PRODUCTS(bf16, float)

HW_PRODUCTS(f16, f16)

HW_PRODUCTS(f16, float)

HW_PRODUCTS(float, float)

HW_LARGE_PRODUCTS(bf16, bf16)

HW_LARGE_PRODUCTS(bf16, float)

HW_LARGE_PRODUCTS(f16, f16)

HW_LARGE_PRODUCTS(f16, float)

HW_LARGE_PRODUCTS(float, float)

HW_SCALED_PRODUCTS(f8e4m3, bf16)

HW_SCALED_PRODUCTS(f8e4m3, f16)

HW_SCALED_PRODUCTS(f8e4m3, float)

HW_PRODUCTS_OF_BLOCKS(f8e4m3, bf16)

HW_PRODUCTS_OF_BLOCKS(f8e4m3, f16)

HW_PRODUCTS_OF_BLOCKS(f8e4m3, float)

}  // namespace hw
