#include "hostweave/few_rows_plan.h"
#include "hostweave/launch.h"
#include "hostweave/types.h"

namespace hw {

#define HW_PRODUCTS(T, Result)                                                \
  __global__ void multiply_few_rows(FewRows<T, 1> p, ProductEnd<Result> end); \
  __global__ void multiply_few_rows_transposed(FewRows<T, 1> p, ProductEnd<Result> end);

HW_PRODUCTS(bf16, bf16)
HW_PRODUCTS(bf16, float)
HW_PRODUCTS(f16, f16)
HW_PRODUCTS(f16, float)
HW_PRODUCTS(float, float)

namespace {

template <class T, class Result>
struct Kernels {
  using Kernel = void (*)(FewRows<T, 1>, ProductEnd<Result>);

  static cudaError_t load() {
    const cudaError_t status = hw::load(static_cast<Kernel>(multiply_few_rows));
    return status == cudaSuccess ? hw::load(static_cast<Kernel>(multiply_few_rows_transposed)) : status;
  }
  static cudaError_t multiply(const FewRowsProduct& product, cudaStream_t stream) {
    const auto& [rows, depth, columns, x, x_pitch, weights, pitch] = product.operands;
    const auto& [result, result_pitch, scale, accumulate, bias, activation] = product.end;
    const Kernel kernel =
        product.transposed ? static_cast<Kernel>(multiply_few_rows_transposed) : static_cast<Kernel>(multiply_few_rows);
    const FewRows<T, 1> p{rows, depth, columns, static_cast<const T*>(x), x_pitch, {static_cast<const T*>(weights[0])}, pitch};
    const auto of_result = [](const void* pointer) { return static_cast<const Result*>(pointer); };
    const ProductEnd<Result> end{static_cast<Result*>(result), result_pitch,    scale,
                                 of_result(accumulate),        of_result(bias), activation};
    return launch_pdl(kernel, grid_of_products(columns, depth), stream, p, end);
  }
  static constexpr FewRowsKernels kTable{load, multiply};
};

}  // namespace

const FewRowsKernels* few_rows_kernels(cudaDataType_t operands, cudaDataType_t result) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return nullptr;
  if (major < 8) return nullptr;  // its tensor cores have no products of bf16
  if (operands == CUDA_R_16BF && result == CUDA_R_16BF) return &Kernels<bf16, bf16>::kTable;
  if (operands == CUDA_R_16BF && result == CUDA_R_32F) return &Kernels<bf16, float>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_16F) return &Kernels<f16, f16>::kTable;
  if (operands == CUDA_R_16F && result == CUDA_R_32F) return &Kernels<f16, float>::kTable;
  if (operands == CUDA_R_32F && result == CUDA_R_32F) return &Kernels<float, float>::kTable;
  return nullptr;
}

}  // namespace hw
