// GEMM on column-major matrices of the supported types, by OpenBLAS or any CBLAS.
#pragma once
#include <cstdint>

#include "cublasLt.h"
#include "types.h"

namespace hostweave::cpu {

struct Operand {  // column-major
  cudaDataType_t type{};
  std::int64_t ld = 0;
  void* at = nullptr;

  template <class T>
  T* as() const {
    return static_cast<T*>(at);
  }
  Operand from(std::int64_t row, std::int64_t column = 0) const { return {type, ld, shift(at, column * ld + row, type)}; }
};

// Scales of an 8-bit operand that is contiguous along k.
struct Scales {
  const float* at = nullptr;
  std::int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  std::int64_t outer = 0, k = 0;  // sizes of the other dim, and of k

  static constexpr std::int64_t kBlock = 128, kStep = 4;  // BLK128x128 pads rows of scales to a multiple of kStep.
  std::int64_t blocks() const { return (k + kBlock - 1) / kBlock; }
  std::int64_t pitch() const { return (blocks() + kStep - 1) / kStep * kStep; }
  std::int64_t count() const {
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return 1;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) return outer;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return outer * blocks();
    return ((outer + kBlock - 1) / kBlock - 1) * pitch() + blocks();
  }
  float of(std::int64_t row, std::int64_t inner) const {
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return *at;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) return at[row];
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return at[inner / kBlock * outer + row];
    return at[row / kBlock * pitch() + inner / kBlock];
  }
};

struct Gemm {  // D = epilogue(alpha op(A) op(B) + beta C)
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  double alpha = 1, beta = 0;
  Operand a, b, c, d;
  enum class Activation { none, relu, gelu } activation = Activation::none;
  Scales scales_a, scales_b;   // used if A and B are 8-bit floats
  const void* bias = nullptr;  // has the type of D, one element per row
};

void run(Gemm gemm);

}  // namespace hostweave::cpu
