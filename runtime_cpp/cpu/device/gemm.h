// General matrix products on row- or column-major matrices of the supported types, by OpenBLAS or any CBLAS.
#pragma once
#include <cstddef>
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

struct Gemm {  // D = epilogue(alpha op(A) op(B) + beta C)
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  double alpha = 1, beta = 0;
  Operand a, b, c, d;
  enum class Activation { none, relu, gelu } activation = Activation::none;
  const void* bias = nullptr;  // of the type of D, one element for each row of it
};

void run(Gemm gemm);

}  // namespace hostweave::cpu
