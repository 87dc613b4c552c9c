// Program `matmul_m` of examples/single_device.py, written by hand. It makes only the library calls of the generated program, so
// the difference of host times is the time of all other code.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/arena.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"

namespace programs::matmul_m {

constexpr char kMesh[] = "mesh(x=1)";
constexpr int64_t kWorld = 1;

struct Inputs {
  hw::Tensor x, w;
};
struct Outputs {
  hw::Tensor y;
};
struct OutputShapes {
  hw::Shape y;
};

class Program {
 public:
  explicit Program(hw::Rank&);
  OutputShapes prepare(const Inputs& in);
  void enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller);
  const hw::Arena& arena() const { return arena_; }

 private:
  static constexpr int kStreams = 4;
  cudaStream_t streams_[kStreams];
  cudaEvent_t forked_, joined_[kStreams], last_call_;
  void* workspaces_[kStreams];
  cublasLtHandle_t blas_;
  cublasLtMatmulDesc_t desc_;
  cublasLtMatrixLayout_t x_, w_, y_;
  cublasLtMatmulAlgo_t algo_;
  hw::Arena arena_;
};

}  // namespace programs::matmul_m
