// keys_in_a_loop on mesh(x=4). program.hw has its host IR.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/attention.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"
#include "hostweave/window.h"

namespace programs::keys_in_a_loop {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Tensors of one rank: its own blocks.
struct Inputs {
  hw::Tensor q{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
  hw::Tensor k{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
  hw::Tensor v{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes that the inputs determine: global dims, and the part of this rank where ranks share a dim unevenly.
struct Sizes {
  int64_t S;

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
  hw::Events arrived_;            // arrived[4]
  hw::AttentionPlan plan_y_blocks_;
  hw::AttentionPlan plan_y_blocks_1_;
  hw::WindowArena arena_;          // which peers write to and read from
  hw::bf16* y_packed_ = nullptr;   // bf16[2, S/4, 128]
  hw::bf16* keys_ = nullptr;       // bf16[4, 2, S/4, 128]
  hw::bf16* y_blocks_ = nullptr;   // bf16[4, 2, S/4, 64]
  float* y_lse_ = nullptr;         // f32[4, 2, S/4], also y_exp_2
  float* y_maximum_ = nullptr;     // f32[1, 2, S/4]
  float* y_sum_ = nullptr;         // f32[1, 2, S/4]
  std::optional<Sizes> prepared_;  // what prepare was last called for
};

}  // namespace programs::keys_in_a_loop
