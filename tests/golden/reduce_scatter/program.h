// reduce_scatter on mesh(x=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"

namespace programs::reduce_scatter {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};  // bf16[3, 1, 4, N]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[3, 1, N]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t N;

  bool operator==(const Sizes&) const = default;
};

class Program {
 public:
  explicit Program(hw::Rank& rank);

  // Checks the inputs, allocates memory and makes plans for their shapes, and returns the output shapes. Call it on every rank
  // before any rank runs. Throws hw::ArgumentError if an input has the wrong dtype, shape or device.
  OutputShapes prepare(const Inputs& in);
  // Enqueues the program after earlier work on stream `caller`. Throws hw::ArgumentError for a wrong tensor, and
  // hw::ExecutionError if the sizes differ from those of the last `prepare`.
  void run(const Inputs& in, const Outputs& out, cudaStream_t caller);

  const hw::Arena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;

  hw::Rank& rank_;
  const hw::Channel& channel_x_;  // 4 ranks along x
  hw::Streams ring_;              // ring[3]
  hw::Arena arena_;
  std::optional<Sizes> prepared_;  // sizes of the last call of `prepare`
};

}  // namespace programs::reduce_scatter
