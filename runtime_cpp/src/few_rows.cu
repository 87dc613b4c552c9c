// The kernels of plans for products of few rows.
#include "hostweave/few_rows.h"

namespace hw {

__device__ float activated(float x, Activation activation) {
  if (activation == Activation::relu) return Maximum()(x, 0.0f);
  if (activation == Activation::gelu_tanh) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  return x;
}

template <bool kTransposed, class T, class Result>
__device__ void multiply(const FewRows<T, 1>& p, const ProductEnd<Result>& end) {
  few_rows<kTransposed>(p, [&](int64_t i, int64_t j, const float (&sums)[1]) {
    const int64_t at = i * end.pitch + j;
    float sum = end.scale * sums[0];
    if (end.accumulate) sum += static_cast<float>(end.accumulate[at]);
    if (end.bias) sum += static_cast<float>(end.bias[j]);
    end.result[at] = static_cast<Result>(activated(sum, end.activation));
  });
}

// No templates: nvcc gives those no name that another file can launch them by.
#define HW_PRODUCTS(T, Result)                                                                                                  \
  __global__ void __launch_bounds__(kProductThreads, 2) multiply_few_rows(FewRows<T, 1> p, ProductEnd<Result> end) {            \
    multiply<false>(p, end);                                                                                                    \
  }                                                                                                                             \
  __global__ void __launch_bounds__(kProductThreads, 2) multiply_few_rows_transposed(FewRows<T, 1> p, ProductEnd<Result> end) { \
    multiply<true>(p, end);                                                                                                     \
  }

// The paragraphs below are compiled each by itself.

HW_PRODUCTS(bf16, bf16)

HW_PRODUCTS(bf16, float)

HW_PRODUCTS(f16, f16)

HW_PRODUCTS(f16, float)

HW_PRODUCTS(float, float)

}  // namespace hw
