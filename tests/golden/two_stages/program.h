// two_stages on mesh(x=4). program.hw has its host IR.
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

// Tensors of one rank: its own blocks.
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

// Sizes that the inputs determine: global dims, and the part of this rank where ranks share a dim unevenly.
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

  // Checks dtypes, shapes and devices, allocates and plans for these shapes, and returns those of the outputs. Every rank
  // prepares before any rank runs. Throws hw::ArgumentError for an input that does not fit.
  OutputShapes prepare(const Inputs& in);
  // Only enqueues. Ordered after what `caller` holds, and `caller` is ordered after it. Throws hw::ArgumentError for an array
  // that does not fit, hw::ExecutionError for sizes other than `prepare` was last given.
  void run(const Inputs& in, const Outputs& out, cudaStream_t caller);

  const hw::Arena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;

  hw::Rank& rank_;
  const bool on_ranks_0_1_;       // whether this rank is in mesh(x=2 of ranks 0, 1)
  const bool on_ranks_2_3_;       // whether this rank is in mesh(x=2 of ranks 2, 3)
  const hw::Channel& channel_x_;  // the 4 ranks along x
  hw::MatmulPlan plan_h_;
  hw::MatmulPlan plan_y_;
  hw::Arena arena_;
  char* workspace_ = nullptr;      // of the matmuls on the caller's stream
  hw::bf16* h_ = nullptr;          // bf16[local(M, x on ranks 0, 1), N]
  hw::bf16* arrived_ = nullptr;    // bf16[local(M, x on ranks 2, 3), N]
  std::optional<Sizes> prepared_;  // what prepare was last called for
};

}  // namespace programs::two_stages
