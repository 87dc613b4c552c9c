// two_stages_streamed on mesh(x=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"

namespace programs::two_stages_streamed {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};      // bf16[M, K]
  hw::Tensor up1{.dtype = CUDA_R_16BF};    // bf16[K, local(N, x on ranks 0, 1)]
  hw::Tensor down1{.dtype = CUDA_R_16BF};  // bf16[local(N, x on ranks 0, 1), K]
  hw::Tensor up2{.dtype = CUDA_R_16BF};    // bf16[K, local(N, x on ranks 2, 3)]
  hw::Tensor down2{.dtype = CUDA_R_16BF};  // bf16[local(N, x on ranks 2, 3), K]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[M, K]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t M;
  int64_t K;
  int64_t N;
  int64_t N_x_of_ranks_0_1;
  int64_t N_x_of_ranks_2_3;

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
  const bool on_ranks_2_3_;                    // this rank is in mesh(x=2 of ranks 2, 3)
  const bool on_ranks_0_1_;                    // this rank is in mesh(x=2 of ranks 0, 1)
  const hw::Channel& channel_x_;               // 4 ranks along x
  const hw::Channel& channel_x_of_ranks_0_1_;  // 2 ranks along x of mesh(x=2 of ranks 0, 1)
  const hw::Channel& channel_x_of_ranks_2_3_;  // 2 ranks along x of mesh(x=2 of ranks 2, 3)
  hw::Streams ring_;                           // ring[4]
  hw::Events turn_;                            // turn[1]
  hw::MatmulPlan plan_h_;
  hw::MatmulPlan plan_matmul_down1_;
  hw::MatmulPlan plan_g_;
  hw::MatmulPlan plan_y_;
  hw::Arena arena_;
  hw::bf16* arrived_ = nullptr;              // bf16[M, K]
  std::array<hw::bf16*, 4> h_{};             // bf16[M/4, local(N, x on ranks 0, 1)], one per stream
  std::array<hw::bf16*, 4> matmul_down1_{};  // bf16[M/4, K], also layer, one per stream
  std::array<hw::bf16*, 4> g_{};             // bf16[M/4, local(N, x on ranks 2, 3)], one per stream
  std::optional<Sizes> prepared_;            // sizes of the last call of `prepare`
};

}  // namespace programs::two_stages_streamed
