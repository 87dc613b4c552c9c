// trained_in_zigzag on mesh(cp=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/attention.h"
#include "hostweave/rank.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"

namespace programs::trained_in_zigzag {

constexpr char kMesh[] = "mesh(cp=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor q{.dtype = CUDA_R_16BF};   // bf16[4, S/4, 64]
  hw::Tensor k{.dtype = CUDA_R_16BF};   // bf16[2, S/4, 64]
  hw::Tensor v{.dtype = CUDA_R_16BF};   // bf16[2, S/4, 64]
  hw::Tensor dy{.dtype = CUDA_R_16BF};  // bf16[4, S/4, 64]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};   // bf16[4, S/4, 64]
  hw::Tensor dq{.dtype = CUDA_R_16BF};  // bf16[4, S/4, 64]
  hw::Tensor dk{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
  hw::Tensor dv{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
};

struct OutputShapes {
  hw::Shape y;
  hw::Shape dq;
  hw::Shape dk;
  hw::Shape dv;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t S;

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
  const hw::Channel& channel_cp_;  // 4 ranks along cp
  hw::AttentionPlan plan_y_first_;
  hw::AttentionPlan plan_y_second_;
  hw::AttentionBackwardPlan plan_dq_first_;
  hw::AttentionBackwardPlan plan_dq_second_;
  hw::Arena arena_;
  hw::bf16* k_in_order_gathered_ = nullptr;       // bf16[4, 2, 2, S/8, 64]
  hw::bf16* v_in_order_gathered_ = nullptr;       // bf16[4, 2, 2, S/8, 64]
  hw::bf16* k_in_order_pieces_ = nullptr;         // bf16[2, 2, 4, S/8, 64]
  hw::bf16* v_in_order_pieces_ = nullptr;         // bf16[2, 2, 4, S/8, 64]
  float* lse_first_ = nullptr;                    // f32[4, S/8]
  float* lse_second_ = nullptr;                   // f32[4, S/8]
  hw::bf16* dk_before_first_partial_ = nullptr;   // bf16[2, S/2, 64]
  hw::bf16* dv_before_first_partial_ = nullptr;   // bf16[2, S/2, 64]
  hw::bf16* dk_before_second_partial_ = nullptr;  // bf16[2, S, 64]
  hw::bf16* dv_before_second_partial_ = nullptr;  // bf16[2, S, 64]
  hw::bf16* dk_before_concat_ = nullptr;          // bf16[2, 2, S/2, 64]
  hw::bf16* dv_before_concat_ = nullptr;          // bf16[2, 2, S/2, 64]
  hw::bf16* dk_pieces_ = nullptr;                 // bf16[4, 2, 2, S/8, 64]
  hw::bf16* dv_pieces_ = nullptr;                 // bf16[4, 2, 2, S/8, 64]
  std::optional<Sizes> prepared_;                 // sizes of the last call of `prepare`
};

}  // namespace programs::trained_in_zigzag
