// in_zigzag on mesh(cp=2). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
// k_gathered of in_zigzag, predicted: put(2) 52.1 us, p2p(2) 64.8 us, none 76.4 us
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <optional>

#include "hostweave/attention.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"
#include "hostweave/window.h"

namespace programs::in_zigzag {

constexpr char kMesh[] = "mesh(cp=2)";
constexpr int64_t kWorld = 2;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor q{.dtype = CUDA_R_16BF};  // bf16[4, S/2, 64]
  hw::Tensor k{.dtype = CUDA_R_16BF};  // bf16[2, S/2, 64]
  hw::Tensor v{.dtype = CUDA_R_16BF};  // bf16[2, S/2, 64]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[4, S/2, 64]
};

struct OutputShapes {
  hw::Shape y;
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

  const hw::WindowArena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;

  hw::Rank& rank_;
  const hw::Channel& channel_cp_;  // 2 ranks along cp
  hw::Streams ring_;               // ring[2]
  hw::Streams puts_;               // puts[1]
  hw::Events arrived_;             // arrived[2]
  hw::AttentionPlan plan_y_attention_blocks_;
  hw::AttentionPlan plan_y_attention_blocks_1_;
  hw::AttentionPlan plan_y_attention_blocks_2_;
  hw::WindowArena arena_;                                      // peers access this memory
  hw::bf16* y_attention_packed_ = nullptr;                     // bf16[2, S/2, 128]
  hw::bf16* k_gathered_ = nullptr;                             // bf16[2, 2, S/2, 128]
  hw::bf16* y_attention_blocks_ = nullptr;                     // bf16[2, 4, S/2, 64]
  float* y_attention_lse_ = nullptr;                           // f32[2, 4, S/2], also y_attention_exp_2
  std::array<float*, 2> y_attention_lse_i_own_half_packed_{};  // f32[4, S/4], one per stream
  float* y_attention_maximum_ = nullptr;                       // f32[1, 4, S/2]
  float* y_attention_sum_ = nullptr;                           // f32[1, 4, S/2]
  std::optional<Sizes> prepared_;                              // sizes of the last call of `prepare`
};

}  // namespace programs::in_zigzag
