// weights_by_columns on mesh(dp=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
// all_down of weights_by_columns, predicted: put(4) 44.5 us, put(1) 43.2 us, none 91.8 us
// all_up of weights_by_columns, predicted: put(4) 189.9 us, none 106.0 us, put(1) 170.9 us
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

namespace programs::weights_by_columns {

constexpr char kMesh[] = "mesh(dp=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};     // bf16[local(M, dp), K]
  hw::Tensor up{.dtype = CUDA_R_16BF};    // bf16[N/4, K]
  hw::Tensor down{.dtype = CUDA_R_16BF};  // bf16[N, K/4]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[local(M, dp), K]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t M;
  int64_t K;
  int64_t N;
  int64_t M_dp;

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

  const hw::WindowArena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;

  hw::Rank& rank_;
  const hw::Channel& channel_dp_;  // 4 ranks along dp
  hw::Streams comm_;               // comm[1]
  hw::Events all_up_ready_;        // all_up_ready[1]
  hw::Events all_down_ready_;      // all_down_ready[1]
  hw::MatmulPlan plan_h_;
  hw::MatmulPlan plan_y_;
  hw::WindowArena arena_;          // peers access this memory
  char* workspace_ = nullptr;      // cuBLASLt workspace of the caller's stream
  hw::bf16* all_up_ = nullptr;     // bf16[4, N/4, K]
  hw::bf16* all_down_ = nullptr;   // bf16[4, N, K/4]
  hw::bf16* h_ = nullptr;          // bf16[local(M, dp), N]
  std::optional<Sizes> prepared_;  // sizes of the last call of `prepare`
};

}  // namespace programs::weights_by_columns
