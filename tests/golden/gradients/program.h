// gradients on mesh(x=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"

namespace programs::gradients {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};   // bf16[local(T, x), K]
  hw::Tensor dy{.dtype = CUDA_R_16BF};  // bf16[local(T, x), N]
  hw::Tensor w{.dtype = CUDA_R_16BF};   // bf16[K, N]
};

struct Outputs {
  hw::Tensor dx{.dtype = CUDA_R_16BF};  // bf16[local(T, x), K]
  hw::Tensor dw{.dtype = CUDA_R_16BF};  // bf16[K, N]
  hw::Tensor db{.dtype = CUDA_R_16BF};  // bf16[N]
};

struct OutputShapes {
  hw::Shape dx;
  hw::Shape dw;
  hw::Shape db;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t T;
  int64_t K;
  int64_t N;
  int64_t T_x;

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
  hw::Streams comm_;              // comm[1]
  hw::MatmulPlan plan_dw_;
  hw::MatmulPlan plan_dx_;
  hw::Arena arena_;
  char* workspace_ = nullptr;      // cuBLASLt workspace of the caller's stream
  std::optional<Sizes> prepared_;  // sizes of the last call of `prepare`
};

}  // namespace programs::gradients
