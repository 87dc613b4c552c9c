// Matrix products by cuBLASLt: planned once for each shape, then only enqueued.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "hostweave/rank.h"
#include "hostweave/tensor.h"

namespace hw {

// Where the elements of an operand lie: shape, and strides in elements.
struct Strided {
  Shape shape;
  Shape strides;

  Strided(std::initializer_list<int64_t> sizes);  // row-major
  Strided(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) : shape(sizes), strides(strides) {}
};

// The product c[..., m, n] = a[..., m, k] b[..., k, n], leading dims broadcast as NumPy does: what cublasLtMatmul needs beside
// the pointers. f16, bf16 and f32 add up in f32 (never TF32), f64 in f64.
class MatmulPlan {
 public:
  MatmulPlan(Rank& rank, cudaDataType_t operands, cudaDataType_t result);
  ~MatmulPlan();
  MatmulPlan(const MatmulPlan&) = delete;
  MatmulPlan& operator=(const MatmulPlan&) = delete;

  // Chooses the algorithm for these operands, or finds it again. Throws ExecutionError where cuBLASLt has none.
  void prepare(const Strided& a, const Strided& b, const Strided& c);

  // c = a b + beta c, as prepared last.
  cublasStatus_t cublasLtMatmul(const void* a, const void* b, void* c, Stream stream, double beta = 0) const;

 private:
  struct Plan;
  cublasStatus_t each_batch(size_t dims, const void* a, const void* b, void* c, Stream stream, double beta) const;
  cublasStatus_t one_batch(const void* a, const void* b, void* c, Stream stream, double beta) const;
  void load_kernels() const;
  cublasStatus_t fill_zero(void* c, cudaStream_t stream) const;

  Rank& rank_;
  cudaDataType_t operands_;
  cudaDataType_t result_;
  bool double_;
  std::vector<Plan*> plans_;
  const Plan* current_ = nullptr;
};

}  // namespace hw
