// All-gather + matmul and matmul + reduce-scatter of cuBLASMp, as variants of put_pipelines.cu.
//
// Needs cuBLASMp 0.10 or later, because the ranks are threads of one process. Only algorithms without multicast are requested.
#pragma once
#include <cublasmp.h>

#include "put_pipelines.h"

#define CHECK_CUBLASMP(call)                        \
  do {                                              \
    const auto e = (call);                          \
    if (e) fail(#call, cublasMpGetStatusString(e)); \
  } while (0)

constexpr std::pair<const char*, cublasMpMatmulAlgoType_t> kMpAlgorithms[] = {
    {"cuBLASMp split", CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P},
    {"cuBLASMp atomic", CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P},
    {"cuBLASMp no overlap", CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP},
};

// y = all_gather(x) @ w, or y = reduce_scatter(x @ w), of row-major matrices. Matrices of cuBLASMp are column-major, so the
// class computes the transposes: y^T = w^T x^T. Each rank has one block of a sharded dim, so the layout is not block-cyclic.
class MpMatmul {
 public:
  // m: rows after the gather or before the scatter. n and k: columns and rows of w on one rank.
  MpMatmul(Gpu& gpu, bool gathers, int64_t m, int64_t n, int64_t k, const bf16* x, const bf16* w, bf16* y,
           cublasMpMatmulAlgoType_t algorithm)
      : gathers_(gathers), m_(m), n_(n), k_(k), ranks_(gpu.ranks), x_(x), w_(w), y_(y) {
    CHECK_CUBLASMP(cublasMpCreate(&handle_, gpu.main));
    CHECK_CUBLASMP(cublasMpGridCreate(ranks_, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR, gpu.comm, &by_rows_));
    CHECK_CUBLASMP(cublasMpGridCreate(1, ranks_, CUBLASMP_GRID_LAYOUT_ROW_MAJOR, gpu.comm, &by_columns_));
    const int64_t shard = m / ranks_;
    if (gathers) {
      weights_ = matrix(n * ranks_, k, n, k, by_rows_);
      operand_ = matrix(k, m, k, shard, by_columns_);
      result_ = matrix(n * ranks_, m, n, shard, by_rows_);
    } else {
      weights_ = matrix(n, k * ranks_, n, k, by_columns_);
      operand_ = matrix(k * ranks_, m, k, shard, by_rows_);
      result_ = matrix(n, m, n, shard, by_columns_);
    }
    CHECK_CUBLASMP(cublasMpMatmulDescriptorCreate(&matmul_, CUBLAS_COMPUTE_32F));
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, CUBLAS_OP_N);
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, CUBLAS_OP_N);
    set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, algorithm);
    if (!gathers) set(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE, CUDA_R_16BF);
    size_t on_host;
    CHECK_CUBLASMP(cublasMpMatmul_bufferSize(handle_, matmul_, rows(), m_, depth(), &kOne, w_, 1, 1, weights_, x_, 1, 1, operand_,
                                             &kZero, nullptr, 1, 1, nullptr, y_, 1, 1, result_, &bytes_, &on_host));
    host_.resize(on_host);
    CHECK_NCCL(ncclMemAlloc(&workspace_, std::max(bytes_, size_t(1))));
    CHECK_CUBLASMP(cublasMpBufferRegister(of_result(), workspace_, bytes_));
  }

  // Returns false if cuBLASMp does not have the algorithm for these matrices. Collective.
  bool is_supported() { return multiply() != CUBLASMP_STATUS_NOT_SUPPORTED; }

  void operator()() { CHECK_CUBLASMP(multiply()); }

  ~MpMatmul() {  // collective
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUBLASMP(cublasMpBufferDeregister(of_result(), workspace_));
    CHECK_NCCL(ncclMemFree(workspace_));
    CHECK_CUBLASMP(cublasMpMatmulDescriptorDestroy(matmul_));
    for (const auto one : {weights_, operand_, result_}) CHECK_CUBLASMP(cublasMpMatrixDescriptorDestroy(one));
    for (const auto grid : {by_rows_, by_columns_}) CHECK_CUBLASMP(cublasMpGridDestroy(grid));
    CHECK_CUBLASMP(cublasMpDestroy(handle_));
  }
  MpMatmul(const MpMatmul&) = delete;
  MpMatmul& operator=(const MpMatmul&) = delete;

 private:
  static constexpr float kOne = 1, kZero = 0;

  cublasMpStatus_t multiply() {
    return cublasMpMatmul(handle_, matmul_, rows(), m_, depth(), &kOne, w_, 1, 1, weights_, x_, 1, 1, operand_, &kZero, nullptr,
                          1, 1, nullptr, y_, 1, 1, result_, workspace_, bytes_, host_.data(), host_.size());
  }

  // The workspace is registered on the grid of the result.
  cublasMpGrid_t of_result() const { return gathers_ ? by_rows_ : by_columns_; }

  int64_t rows() const { return gathers_ ? n_ * ranks_ : n_; }   // rows of y^T on all ranks
  int64_t depth() const { return gathers_ ? k_ : k_ * ranks_; }  // contracted dim (K) over all ranks

  static cublasMpMatrixDescriptor_t matrix(int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
                                           cublasMpGrid_t grid) {
    cublasMpMatrixDescriptor_t made;
    CHECK_CUBLASMP(
        cublasMpMatrixDescriptorCreate(rows, columns, block_rows, block_columns, 0, 0, block_rows, CUDA_R_16BF, grid, &made));
    return made;
  }
  template <typename Value>
  void set(cublasMpMatmulDescriptorAttribute_t attribute, Value value) {
    CHECK_CUBLASMP(cublasMpMatmulDescriptorSetAttribute(matmul_, attribute, &value, sizeof value));
  }

  const bool gathers_;
  const int64_t m_, n_, k_, ranks_;
  const bf16 *x_, *w_;
  bf16* y_;
  cublasMpHandle_t handle_;
  cublasMpGrid_t by_rows_, by_columns_;
  cublasMpMatrixDescriptor_t weights_, operand_, result_;
  cublasMpMatmulDescriptor_t matmul_;
  size_t bytes_;
  std::vector<char> host_;
  void* workspace_;
};
