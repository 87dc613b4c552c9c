// Matrix products by cuBLASLt: planned for each shape, then only enqueued.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <initializer_list>

#include "hostweave/hidden.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"

#if defined(CUBLAS_VERSION) && CUBLAS_VERSION < 120800
enum { CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0 };  // the only mode that these versions have
#endif

namespace hw {

// Where the elements of an operand lie: shape, and strides in elements.
struct Strided {
  Shape shape;
  Shape strides;

  auto operator<=>(const Strided&) const = default;

  Strided(std::initializer_list<int64_t> sizes);  // row-major
  Strided(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) : shape(sizes), strides(strides) {}
};

// What becomes of a product before it is rounded, besides the plan's activation.
struct Epilogue {
  double scale = 1;
  const void* accumulate = nullptr;  // added to the product: where c lies, or as c does
  const void* bias = nullptr;        // one element for each column of c, if the plan's epilogue has a bias
  const void* scale_a = nullptr;     // of a plan with scales, f32
  const void* scale_b = nullptr;
};

// Scales of 8-bit floats a[m, k], whose rows lie side by side, and b[k, n], whose columns do. OUTER_VEC has one for each row of a
// and each column of b, VEC128 also for each 128 elements along k: those of the rows lie side by side. BLK128x128 has one for
// each 128 x 128 elements, of which those along k lie side by side, and rows of them are padded to multiples of 4.
struct Scaling {
  cudaDataType_t operand_b;
  int32_t a, b;  // a cublasLtMatmulMatrixScale_t
};

// The product c[..., m, n] = a[..., m, k] b[..., k, n], leading dims broadcast as NumPy does: what cublasLtMatmul needs beside
// the pointers. f16, bf16 and f32 add up in f32, f64 in f64; f32 is multiplied as TF32 by CUBLAS_COMPUTE_32F_FAST_TF32 alone.
class MatmulPlan {
 public:
  MatmulPlan(Rank& rank, cudaDataType_t operands, cudaDataType_t result, cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT,
             cublasComputeType_t compute = CUBLAS_COMPUTE_32F);
  // The product of 8-bit floats with scales.
  MatmulPlan(Rank& rank, cudaDataType_t operand_a, cudaDataType_t result, cublasLtEpilogue_t epilogue, Scaling scaling);

  // Chooses the algorithm for these operands, or finds it again among those of the last kMostPlans shapes. To choose, it waits
  // for what the device has in flight. Where the rank measures, of those that cuBLASLt recommends the fastest is taken. Throws
  // ExecutionError where cuBLASLt has none.
  void prepare(const Strided& a, const Strided& b, const Strided& c);

  // c = activation(scale a b + accumulate + bias), as prepared last: one cublasLtMatmul, or one for each of the outer leading
  // dims.
  cublasStatus_t multiply(const void* a, const void* b, void* c, Stream stream, const Epilogue& epilogue = {}) const;

 private:
  struct Plan;
  struct Plans;
  cublasStatus_t each_batch(size_t dims, const void* a, const void* b, void* c, Stream stream, Epilogue epilogue) const;
  cublasStatus_t one_batch(const Plan& plan, const void* a, const void* b, void* c, Stream stream,
                           const Epilogue& epilogue) const;
  bool has_bias() const { return (epilogue_ & CUBLASLT_EPILOGUE_BIAS) != 0; }
  Plan* planned(const Strided& a, const Strided& b, const Strided& c) const;  // a new one
  void describe(Plan& plan) const;
  void load_kernels(const Plan& plan) const;
  cublasLtMatmulAlgo_t fastest(Plan& plan, const cublasLtMatmulAlgo_t* algorithms, int count) const;
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
