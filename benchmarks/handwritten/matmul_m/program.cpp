#include "program.h"

#include <cstdlib>

#include "hostweave/types.h"

#define CHECK(call) \
  if ((call) != 0) std::abort()

namespace programs::matmul_m {

constexpr int64_t kChunks = 48;
constexpr size_t kWorkspace = size_t{32} << 20;

Program::Program(hw::Rank&) {
  CHECK(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming));
  for (int i = 0; i < kStreams; ++i) {
    CHECK(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&joined_[i], cudaEventDisableTiming));
    CHECK(cudaMalloc(&workspaces_[i], kWorkspace));
  }
  CHECK(cublasLtCreate(&blas_));
  CHECK(cublasLtMatmulDescCreate(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
}

OutputShapes Program::prepare(const Inputs& in) {
  const int64_t m = in.x.dim(0) / kChunks, k = in.x.dim(1), n = in.w.dim(1);
  CHECK(cublasLtMatrixLayoutCreate(&x_, CUDA_R_16BF, k, m, k));
  CHECK(cublasLtMatrixLayoutCreate(&w_, CUDA_R_16BF, n, k, n));
  CHECK(cublasLtMatrixLayoutCreate(&y_, CUDA_R_16BF, n, m, n));
  cublasLtMatmulPreference_t preference;
  CHECK(cublasLtMatmulPreferenceCreate(&preference));
  CHECK(
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace, sizeof kWorkspace));
  cublasLtMatmulHeuristicResult_t best;
  int found;
  CHECK(cublasLtMatmulAlgoGetHeuristic(blas_, desc_, w_, x_, y_, y_, preference, 1, &best, &found));
  CHECK(cublasLtMatmulPreferenceDestroy(preference));
  algo_ = best.algo;
  return {{in.x.dim(0), in.w.dim(1)}};
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const int64_t m = in.x.dim(0) / kChunks, k = in.x.dim(1), n = in.w.dim(1);
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const float one = 1, zero = 0;
  CHECK(cudaStreamWaitEvent(caller, last_call_, 0));
  CHECK(cudaEventRecord(forked_, caller));
  for (cudaStream_t stream : streams_) CHECK(cudaStreamWaitEvent(stream, forked_, 0));
  for (int64_t i = 0; i < kChunks; ++i) {
    const auto* a = x + i * m * k;
    auto* c = y + i * m * n;
    CHECK(cublasLtMatmul(blas_, desc_, &one, w, w_, a, x_, &zero, c, y_, c, y_, &algo_, workspaces_[i % kStreams], kWorkspace,
                         streams_[i % kStreams]));
  }
  for (int i = 0; i < kStreams; ++i) {
    CHECK(cudaEventRecord(joined_[i], streams_[i]));
    CHECK(cudaStreamWaitEvent(caller, joined_[i], 0));
  }
  CHECK(cudaEventRecord(last_call_, caller));
}

}  // namespace programs::matmul_m
