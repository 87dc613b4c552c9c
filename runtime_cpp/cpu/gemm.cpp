#include "gemm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "hostweave_cpu.h"
#include "machine.h"

// The symbols of the scipy-openblas32 wheel have a prefix, so that a process can also load other BLAS libraries.
#ifdef HOSTWEAVE_SCIPY_OPENBLAS
#define HW_BLAS(name) scipy_##name
#else
#define HW_BLAS(name) name
#endif

extern "C" {
// Declarations as in cblas.h, with enums as ints.
void HW_BLAS(cblas_sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int lda,
                          const float* b, int ldb, float beta, float* c, int ldc);
void HW_BLAS(cblas_dgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double* a,
                          int lda, const double* b, int ldb, double beta, double* c, int ldc);
// These symbols are weak, because other CBLAS libraries lack these functions.
void HW_BLAS(openblas_set_num_threads)(int threads) __attribute__((weak));
int HW_BLAS(openblas_get_num_threads)(void) __attribute__((weak));
}

namespace hostweave::cpu {
namespace {

constexpr int kColumnMajor = 102, kNoTranspose = 111, kTranspose = 112;

// D = alpha op(A) op(B) + beta D, with A and B in the compute type.
template <class T>
void multiply(const Gemm& g, const Operand& d) {
  const auto run = [&](auto gemm) {
    gemm(kColumnMajor, g.transpose_a ? kTranspose : kNoTranspose, g.transpose_b ? kTranspose : kNoTranspose, g.m, g.n, g.k,
         static_cast<T>(g.alpha), g.a.as<T>(), g.a.ld, g.b.as<T>(), g.b.ld, static_cast<T>(g.beta), d.as<T>(), d.ld);
  };
  if constexpr (std::is_same_v<T, double>) {
    run(HW_BLAS(cblas_dgemm));
  } else {
    run(HW_BLAS(cblas_sgemm));
  }
}

// Makes OpenBLAS use one thread. All workers call OpenBLAS, but the thread pool of OpenBLAS serves only one call at a time.
void use_one_thread() {
  if (HW_BLAS(openblas_set_num_threads) && HW_BLAS(openblas_get_num_threads) && HW_BLAS(openblas_get_num_threads)() != 1) {
    HW_BLAS(openblas_set_num_threads)(1);
  }
}

// Each thread reuses its memory for conversions, because page faults would take longer than the conversions.
template <class T>
T* at_least(std::size_t size, std::vector<T>& scratch) {
  if (size > scratch.size()) scratch = std::vector<T>(), scratch.resize(size);
  return scratch.data();
}

template <class To, class From>
void convert_row(void* to, const void* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) static_cast<To*>(to)[i] = static_cast<To>(static_cast<const From*>(from)[i]);
}

template <class T>
void load_row(T* to, const void* from, std::int64_t count, cudaDataType_t type) {
  if (type == CUDA_R_16BF) return convert_row<T, __nv_bfloat16>(to, from, count);
  if (type == CUDA_R_16F) return convert_row<T, __half>(to, from, count);
  if (type == CUDA_R_32F) return convert_row<T, float>(to, from, count);
  std::memcpy(to, from, count * sizeof(T));
}
template <class T>
void store_row(void* to, const T* from, std::int64_t count, cudaDataType_t type) {
  if (type == CUDA_R_16BF) return convert_row<__nv_bfloat16, T>(to, from, count);
  if (type == CUDA_R_16F) return convert_row<__half, T>(to, from, count);
  convert_row<float, T>(to, from, count);
}

template <class T>
void activate(T* column, std::int64_t rows, Gemm::Activation activation) {
  if (activation == Gemm::Activation::relu) {
    for (std::int64_t i = 0; i < rows; ++i) column[i] = column[i] < 0 ? T{0} : column[i];
  } else if (activation == Gemm::Activation::gelu) {  // tanh approximation, as in cuBLASLt
    for (std::int64_t i = 0; i < rows; ++i) {
      const T x = column[i];
      column[i] = T(0.5) * x * (T(1) + std::tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
    }
  }
}

template <class T>
void finish(const Gemm& g, const Operand& d) {
  if (!g.bias && g.activation == Gemm::Activation::none) return;
  std::vector<T> bias(g.bias ? g.m : 0);
  if (g.bias) load_row(bias.data(), g.bias, g.m, g.d.type);
  for (std::int64_t column = 0; column < g.n; ++column) {
    T* const at = d.from(0, column).as<T>();
    for (std::size_t row = 0; row < bias.size(); ++row) at[row] += bias[row];
    activate(at, g.m, g.activation);
  }
}

// Runs a GEMM whose matrices all have the compute type.
template <class T>
void run_plain(const Gemm& g) {
  if (g.beta != 0 && g.c.at != g.d.at) {
    for (std::int64_t column = 0; column < g.n; ++column) {
      std::memcpy(g.d.from(0, column).at, g.c.from(0, column).at, g.m * sizeof(T));
    }
  }
  multiply<T>(g, g.d);
  finish<T>(g, g.d);
}

Operand as_floats(const Operand& matrix, std::int64_t inner, std::int64_t outer, std::vector<float>& scratch) {
  if (matrix.type == CUDA_R_32F) return matrix;
  float* const copy = at_least(inner * outer, scratch);
  constexpr std::int64_t piece_elements = 1 << 18;
  const std::int64_t columns = std::max<std::int64_t>(piece_elements / std::max<std::int64_t>(inner, 1), 1);
  Machine::get().split(outer, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t column = begin; column < end; ++column) {
      load_row(copy + column * inner, matrix.from(0, column).at, inner, matrix.type);
    }
  });
  return {CUDA_R_32F, std::max<std::int64_t>(inner, 1), copy};
}

// Runs a GEMM of operands of type T. Accumulates in T. Rounds the sums to f32, and then to the type of D.
template <class T>
void run_rounded(const Gemm& g) {
  thread_local std::vector<T> scratch;
  const Operand d{std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_64F, g.m, at_least(g.m * g.n, scratch)};
  for (std::int64_t column = 0; column < g.n && g.beta != 0; ++column) {
    load_row(d.from(0, column).as<T>(), g.c.from(0, column).at, g.m, g.c.type);
  }
  multiply<T>(g, d);
  finish<T>(g, d);
  for (std::int64_t column = 0; column < g.n; ++column) {
    store_row(g.d.from(0, column).at, d.from(0, column).as<T>(), g.m, g.d.type);
  }
}

// Multiplies an 8-bit operand by its scales. The products are exact in f64.
Operand unscaled(const Operand& matrix, const Scales& scales, std::vector<double>& memory) {
  memory.resize(std::max<std::int64_t>(scales.k * scales.outer, 1));
  std::array<double, 256> values;
  for (int bits = 0; bits < 256; ++bits) {
    const auto byte = static_cast<unsigned char>(bits);
    values[bits] = matrix.type == CUDA_R_8F_E4M3 ? static_cast<float>(std::bit_cast<__nv_fp8_e4m3>(byte))
                                                 : static_cast<float>(std::bit_cast<__nv_fp8_e5m2>(byte));
  }
  for (std::int64_t row = 0; row < scales.outer; ++row) {
    const auto* const from = static_cast<const unsigned char*>(matrix.from(0, row).at);
    for (std::int64_t begin = 0; begin < scales.k; begin += Scales::kBlock) {
      const double scale = scales.of(row, begin);
      const std::int64_t end = std::min(begin + Scales::kBlock, scales.k);
      for (std::int64_t i = begin; i < end; ++i) memory[row * scales.k + i] = scale * values[from[i]];
    }
  }
  return {CUDA_R_64F, std::max<std::int64_t>(scales.k, 1), memory.data()};
}

// Splits a large GEMM along the longer side of D. There is at most one block per idle worker, and one for the calling thread.
void in_blocks(const Gemm& g, void (*run_block)(const Gemm&)) {
  constexpr std::int64_t narrowest = 64, worthwhile = 2 << 20;
  const bool by_column = g.n >= g.m;
  const std::int64_t side = by_column ? g.n : g.m;
  std::int64_t blocks = 1;
  if (g.m * g.n * g.k >= worthwhile) {
    const auto workers = static_cast<std::int64_t>(Machine::get().idle_workers()) + 1;
    blocks = std::clamp<std::int64_t>(side / narrowest, 1, workers);
  }
  Machine::get().split(side, (side + blocks - 1) / blocks, [&](std::size_t begin, std::size_t end) {
    const std::int64_t row = by_column ? 0 : begin, column = by_column ? begin : 0;
    Gemm block = g;
    (by_column ? block.n : block.m) = end - begin;
    block.a = g.transpose_a ? g.a.from(0, row) : g.a.from(row);
    block.b = g.transpose_b ? g.b.from(column) : g.b.from(0, column);
    block.c = g.c.from(row, column);
    block.d = g.d.from(row, column);
    block.bias = shift(g.bias, row, g.d.type);
    run_block(block);
  });
}

}  // namespace

void run(Gemm g) {
  if (g.m == 0 || g.n == 0) return;
  use_one_thread();
  if (g.d.type == CUDA_R_64F) return in_blocks(g, run_plain<double>);
  if (type_size(g.a.type) == 1) {
    std::vector<double> a, b;
    g.a = unscaled(g.a, g.scales_a, a), g.b = unscaled(g.b, g.scales_b, b);
    return in_blocks(g, run_rounded<double>);
  }
  thread_local std::vector<float> scratch_a, scratch_b;
  g.a = as_floats(g.a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, scratch_a);
  g.b = as_floats(g.b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, scratch_b);
  const bool plain = g.d.type == CUDA_R_32F && (g.beta == 0 || g.c.type == CUDA_R_32F);
  in_blocks(g, plain ? run_plain<float> : run_rounded<float>);
}

}  // namespace hostweave::cpu

void hw_cpu_multiply(const float* a, std::int64_t a_pitch, const float* b, std::int64_t b_pitch, bool b_transposed, float* c,
                     std::int64_t c_pitch, std::int64_t m, std::int64_t n, std::int64_t k, float beta) {
  using namespace hostweave::cpu;
  Gemm g;  // column-major: c' = b' a'
  g.transpose_a = b_transposed;
  g.m = n, g.n = m, g.k = k, g.beta = beta;
  g.a = {CUDA_R_32F, b_pitch, const_cast<float*>(b)}, g.b = {CUDA_R_32F, a_pitch, const_cast<float*>(a)};
  use_one_thread();
  multiply<float>(g, {CUDA_R_32F, c_pitch, c});
}

void hw_cpu_product(cudaDataType_t operands, const void* a, std::int64_t a_pitch, bool a_transposed, const void* b,
                    std::int64_t b_pitch, bool b_transposed, cudaDataType_t result, void* c, std::int64_t c_pitch, std::int64_t m,
                    std::int64_t n, std::int64_t k) {
  using namespace hostweave::cpu;
  Gemm g;  // column-major: c' = b' a'
  g.transpose_a = b_transposed, g.transpose_b = a_transposed;
  a_pitch = std::max({a_pitch, a_transposed ? m : k, std::int64_t{1}});  // The pitch of a single row may have any value.
  b_pitch = std::max({b_pitch, b_transposed ? k : n, std::int64_t{1}});
  c_pitch = std::max({c_pitch, n, std::int64_t{1}});
  g.m = n, g.n = m, g.k = k, g.beta = 0;
  g.a = {operands, b_pitch, const_cast<void*>(b)}, g.b = {operands, a_pitch, const_cast<void*>(a)}, g.d = {result, c_pitch, c};
  run(g);
}
