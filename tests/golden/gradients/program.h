// gradients on mesh(x=4). program.hw has its host IR.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"

namespace programs::gradients {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Tensors of one rank: its own blocks.
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

// Sizes that the inputs determine: global dims, and the part of this rank where ranks share a dim unevenly.
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
  const hw::Channel& channel_x_;  // the 4 ranks along x
  hw::Streams comm_;              // comm[1]
  hw::MatmulPlan plan_dw_partial_;
  hw::MatmulPlan plan_dx_;
  hw::Arena arena_;
  char* workspace_ = nullptr;       // of the matmuls on the caller's stream
  hw::bf16* dw_partial_ = nullptr;  // bf16[K, N]
  hw::bf16* db_partial_ = nullptr;  // bf16[N]
  std::optional<Sizes> prepared_;   // what prepare was last called for
};

}  // namespace programs::gradients
