// ag_matmul_pull on mesh(x=4). program.hw has its host IR.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/matmul.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"
#include "hostweave/window.h"

namespace programs::ag_matmul_pull {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Tensors of one rank: its own blocks.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};  // bf16[M/4, K]
  hw::Tensor w{.dtype = CUDA_R_16BF};  // bf16[K, N]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[M, N]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes that the inputs determine: global dims, and the part of this rank where ranks share a dim unevenly.
struct Sizes {
  int64_t M;
  int64_t K;
  int64_t N;

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

  const hw::WindowArena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;

  hw::Rank& rank_;
  const hw::Channel& channel_x_;  // the 4 ranks along x
  hw::Streams ring_;              // ring[2]
  hw::Streams puts_;              // puts[1]
  hw::Events arrived_;            // arrived[8]
  hw::MatmulPlan plan_y_;
  hw::WindowArena arena_;           // which peers write to and read from
  hw::bf16* h_ = nullptr;           // bf16[M/4, K]
  hw::bf16* h_gathered_ = nullptr;  // bf16[M, K]
  std::optional<Sizes> prepared_;   // what prepare was last called for
};

}  // namespace programs::ag_matmul_pull
