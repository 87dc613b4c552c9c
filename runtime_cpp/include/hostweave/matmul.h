// Matmuls by cuBLASLt or, for few rows, by kernels of this package. `prepare` makes plans; `multiply` only enqueues work.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "hostweave/hidden.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"

#if defined(CUBLAS_VERSION) && CUBLAS_VERSION < 120800
enum { CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0 };  // cuBLASLt before 12.8 has only this mode, without a name
#endif

namespace hw {

// Layout of an operand: shape, and strides in elements.
struct Strided {
  Shape shape;
  Shape strides;

  auto operator<=>(const Strided&) const = default;

  Strided(std::initializer_list<int64_t> sizes);  // row-major
  Strided(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) : shape(sizes), strides(strides) {}
};

// Operands of a call's epilogue. The epilogue is applied before rounding. The activation is a part of the plan.
struct Epilogue {
  double scale = 1;
  const void* accumulate = nullptr;  // added to the product; c itself, or a matrix with the layout of c
  const void* bias = nullptr;        // one element per column of c, if the plan's epilogue has a bias
  const void* scale_a = nullptr;     // f32, for a plan with scales
  const void* scale_b = nullptr;
};

// Modes of scales for 8-bit floats a[m, k], row-major, and b[k, n], column-major. OUTER_VEC: one scale per row of a or column of
// b. VEC128: one scale per 128 elements of a row of a or column of b; scales of adjacent rows or columns are contiguous.
// BLK128x128: one scale per 128 x 128 elements; scales along k are contiguous, and each row of scales is padded to a multiple of
// 4.
struct Scaling {
  cudaDataType_t operand_b;
  int32_t a, b;  // a cublasLtMatmulMatrixScale_t
};

// Plan of c[..., m, n] = a[..., m, k] b[..., k, n] with NumPy broadcasting of leading dims. 8-bit floats, f16, bf16 and f32
// accumulate in f32, and f64 accumulates in f64. f32 uses TF32 only with CUBLAS_COMPUTE_32F_FAST_TF32.
class MatmulPlan {
 public:
  MatmulPlan(Rank& rank, cudaDataType_t operands, cudaDataType_t result, cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT,
             cublasComputeType_t compute = CUBLAS_COMPUTE_32F);
  // Matmul of 8-bit floats with scales.
  MatmulPlan(Rank& rank, cudaDataType_t operand_a, cudaDataType_t result, cublasLtEpilogue_t epilogue, Scaling scaling);

  // Selects an algorithm, unless these layouts are among the last kMostPlans prepared layouts. Selection may wait for the device.
  // If Rank::measures(), measures algorithms that cuBLASLt recommends, and selects by time. Throws ExecutionError if cuBLASLt
  // does not support the matmul.
  void prepare(const Strided& a, const Strided& b, const Strided& c);

  // c = activation(scale a b + accumulate + bias), for the layouts of the last prepare. Calls cublasLtMatmul several times if the
  // leading dims have no common batch stride.
  cublasStatus_t multiply(const void* a, const void* b, void* c, Stream stream, const Epilogue& epilogue = {}) const;

 private:
  struct Plan;
  struct Plans;
  cublasStatus_t each_batch(size_t dims, const void* a, const void* b, void* c, Stream stream, Epilogue epilogue) const;
  cublasStatus_t one_batch(const Plan& plan, const void* a, const void* b, void* c, Stream stream,
                           const Epilogue& epilogue) const;
  bool has_bias() const { return (epilogue_ & CUBLASLT_EPILOGUE_BIAS) != 0; }
  void describe(Plan& plan) const;
  void load_kernels(const Plan& plan) const;
  cublasLtMatmulAlgo_t fastest(Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& algorithms) const;
  const void* zeros(size_t bytes) const;
  void describe_scales(Plan& plan) const;
  cublasStatus_t set_scales(const Plan& plan, const Epilogue& epilogue) const;

  Rank& rank_;
  cudaDataType_t operands_;
  cudaDataType_t result_;
  cublasLtEpilogue_t epilogue_;
  cublasComputeType_t compute_;
  Scaling scaling_;
  bool is_scaled_ = false;
  Hidden<Plans> plans_;
  const Plan* current_ = nullptr;
};

}  // namespace hw
