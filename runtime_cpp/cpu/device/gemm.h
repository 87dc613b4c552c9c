// General matrix products on row- or column-major matrices of the supported types, by OpenBLAS or any CBLAS.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cublasLt.h"

namespace hostweave::cpu {

struct Gemm {  // column-major D = epilogue(alpha op(A) op(B) + beta C)
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  double alpha = 1, beta = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  std::int64_t lda = 0, ldb = 0, ldc = 0, ldd = 0;
  cudaDataType_t type_a{}, type_b{}, type_c{}, type_d{};
  enum class Activation { none, relu, gelu } activation = Activation::none;
  const void* bias = nullptr;  // of the type of D, one element for each row of it
};

void run(const Gemm& gemm);

}  // namespace hostweave::cpu
