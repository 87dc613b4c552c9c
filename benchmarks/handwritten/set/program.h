// Program `set` of examples/single_device.py, written by hand. It makes only the library calls of the generated program. All
// other code of the generated program takes additional host time.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/arena.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"

namespace programs::set {

constexpr char kMesh[] = "mesh(x=1)";
constexpr int64_t kWorld = 1;

struct Inputs {
  hw::Tensor x;
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
  OutputShapes prepare(const Inputs& in) { return {{in.x.dim(0), in.x.dim(1)}}; }
  void enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller);
  const hw::Arena& arena() const { return arena_; }

 private:
  static constexpr int kStreams = 4;
  cudaStream_t streams_[kStreams];
  cudaEvent_t forked_, joined_[kStreams], last_call_;
  hw::Arena arena_;
};

}  // namespace programs::set
