// two_stages on mesh(x=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"

namespace programs::two_stages {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};   // bf16[local(M, x on ranks 0, 1), K]
  hw::Tensor w1{.dtype = CUDA_R_16BF};  // bf16[K, N]
  hw::Tensor w2{.dtype = CUDA_R_16BF};  // bf16[N, K]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[local(M, x on ranks 2, 3), K]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t M;
  int64_t K;
  int64_t N;
  int64_t M_x_of_ranks_0_1;
  int64_t M_x_of_ranks_2_3;

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
  const bool on_ranks_0_1_;       // this rank is in mesh(x=2 of ranks 0, 1)
  const bool on_ranks_2_3_;       // this rank is in mesh(x=2 of ranks 2, 3)
  const hw::Channel& channel_x_;  // 4 ranks along x
  hw::MatmulPlan plan_h_;
  hw::MatmulPlan plan_y_;
  hw::Arena arena_;
  char* workspace_ = nullptr;      // cuBLASLt workspace of the caller's stream
  hw::bf16* h_ = nullptr;          // bf16[local(M, x on ranks 0, 1), N]
  hw::bf16* arrived_ = nullptr;    // bf16[local(M, x on ranks 2, 3), N]
  std::optional<Sizes> prepared_;  // sizes of the last call of `prepare`
};

}  // namespace programs::two_stages
