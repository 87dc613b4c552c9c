// three_layers: (x: bf16[M, E], w_in_0: bf16[E, F@x], w_out_0: bf16[F@x, E], w_in_1: bf16[E, F@x], w_out_1: bf16[F@x, E], w_in_2:
// bf16[E, F@x], w_out_2: bf16[F@x, E]) -> (y: bf16[M@x, E]) on mesh(x=4)
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

// What each call of layer takes of its own.
struct LayerInputs {
  hw::Tensor w_in{.dtype = CUDA_R_16BF};   // bf16[E, local(F, x)]
  hw::Tensor w_out{.dtype = CUDA_R_16BF};  // bf16[local(F, x), E]
};

// What one rank holds.
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

// Global sizes, by the names that the program gives them.
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

  // Throws hw::ArgumentError for an input of the wrong dtype, shape or device; so does all that follows.
  OutputShapes output_shapes(const Inputs& in) const;
  // Allocates and plans for these shapes, once. Every rank prepares before any rank runs.
  void prepare(const Inputs& in);
  // Only enqueues. Ordered after what `caller` holds, and `caller` is ordered after it.
  void run(const Inputs& in, const Outputs& out, cudaStream_t caller);

  const hw::Arena& arena() const { return arena_; }

 private:
  Sizes check(const Inputs& in) const;
  void layer(const hw::bf16* x, const LayerInputs& in, hw::bf16* y, cudaStream_t caller);
  void layer_memory(const Sizes& sizes, hw::MemoryPlan& memory);

  hw::Rank& rank_;
  const hw::Channel& channel_x_;      // the 4 ranks along x
  hw::Streams ring_;                  // ring[4]
  hw::MatmulPlan plan_matmul_w_in_;   // matmul %x_chunk, %w_in -> %matmul_w_in_i
  hw::MatmulPlan plan_matmul_w_out_;  // matmul %h_i, %w_out -> %matmul_w_out_chunk
  hw::Arena arena_;
  hw::bf16* layer_matmul_w_in_ = nullptr;          // %matmul_w_in: bf16[M, local(F, x)], also %h of @layer
  std::array<hw::bf16*, 4> layer_x_gathered_{};    // %x_gathered: bf16[M/4, E] of @layer, one a stream
  hw::bf16* layer_scattered_landing_ = nullptr;    // %scattered_landing: bf16[4, M/4, E] of @layer
  std::array<hw::bf16*, 4> layer_matmul_w_out_{};  // %matmul_w_out: bf16[M/4, E] of @layer, one a stream
  hw::bf16* x_2_ = nullptr;                        // %x_2: bf16[M/4, E]
  hw::bf16* x_3_ = nullptr;                        // %x_3: bf16[M/4, E]
  std::optional<Sizes> prepared_;                  // what prepare was last called for
};

}  // namespace programs::three_layers
