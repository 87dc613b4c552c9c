// three_layers on mesh(x=4). The host IR is in program.hw.
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

namespace programs::three_layers {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// Inputs of one layer.
struct LayerInputs {
  hw::Tensor w_in{.dtype = CUDA_R_16BF};   // bf16[E, local(F, x)]
  hw::Tensor w_out{.dtype = CUDA_R_16BF};  // bf16[local(F, x), E]
};

// Local tensors of one rank.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};  // bf16[M, E]
  LayerInputs layers[3];               // w_in_0 to w_out_2
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};  // bf16[M/4, E]
};

struct OutputShapes {
  hw::Shape y;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t M;
  int64_t E;
  int64_t F;
  int64_t F_x;

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
  void layer(const hw::bf16* x, const LayerInputs& in, hw::bf16* y, cudaStream_t caller);
  void layer_memory(const Sizes& sizes, hw::MemoryPlan& memory);

  hw::Rank& rank_;
  const hw::Channel& channel_x_;  // 4 ranks along x
  hw::Streams ring_;              // ring[4]
  hw::MatmulPlan plan_matmul_w_in_;
  hw::MatmulPlan plan_matmul_w_out_;
  hw::Arena arena_;
  hw::bf16* layer_matmul_w_in_ = nullptr;          // bf16[M, local(F, x)], also h
  std::array<hw::bf16*, 4> layer_x_gathered_{};    // bf16[M/4, E], one per stream
  hw::bf16* layer_scattered_landing_ = nullptr;    // bf16[4, M/4, E]
  std::array<hw::bf16*, 4> layer_matmul_w_out_{};  // bf16[M/4, E], one per stream
  hw::bf16* y_other_ = nullptr;                    // bf16[M/4, E]
  std::optional<Sizes> prepared_;                  // sizes of the last call of `prepare`
};

}  // namespace programs::three_layers
