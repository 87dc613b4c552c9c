// trained_in_zigzag: (q: bf16[4, S@zigzag(cp), 64], k: bf16[2, S@zigzag(cp), 64], v: bf16[2, S@zigzag(cp), 64], dy: bf16[4,
// S@zigzag(cp), 64]) -> (y: bf16[4, S@zigzag(cp), 64], dq: bf16[4, S@zigzag(cp), 64], dk_resharded: bf16[2, S@zigzag(cp), 64],
// dv_resharded: bf16[2, S@zigzag(cp), 64]) on mesh(cp=4)
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

// What one rank holds.
struct Inputs {
  hw::Tensor q{.dtype = CUDA_R_16BF};   // bf16[4, S/4, 64]
  hw::Tensor k{.dtype = CUDA_R_16BF};   // bf16[2, S/4, 64]
  hw::Tensor v{.dtype = CUDA_R_16BF};   // bf16[2, S/4, 64]
  hw::Tensor dy{.dtype = CUDA_R_16BF};  // bf16[4, S/4, 64]
};

struct Outputs {
  hw::Tensor y{.dtype = CUDA_R_16BF};             // bf16[4, S/4, 64]
  hw::Tensor dq{.dtype = CUDA_R_16BF};            // bf16[4, S/4, 64]
  hw::Tensor dk_resharded{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
  hw::Tensor dv_resharded{.dtype = CUDA_R_16BF};  // bf16[2, S/4, 64]
};

struct OutputShapes {
  hw::Shape y;
  hw::Shape dq;
  hw::Shape dk_resharded;
  hw::Shape dv_resharded;
};

// Global sizes, by the names that the program gives them.
struct Sizes {
  int64_t S;

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

  hw::Rank& rank_;
  const hw::Channel& channel_cp_;  // the 4 ranks along cp
  // attention %q_rows, %k_in_order_columns, %v_in_order_columns scaled 0.125 diagonal rank.cp * (S / 8) -> %y_first lse
  // %lse_first
  hw::AttentionPlan plan_y_;
  // attention %q_rows_2, %k_in_order, %v_in_order scaled 0.125 diagonal (3 - rank.cp) * (S / 8) + S / 2 -> %y_second lse
  // %lse_second
  hw::AttentionPlan plan_y_1_;
  // attention_backward %q_rows, %k_in_order_columns, %v_in_order_columns, %y_first, %dy_rows, %lse_first scaled 0.125 diagonal
  // rank.cp * (S / 8) -> %dq_first, %dk_first_partial, %dv_first_partial
  hw::AttentionBackwardPlan plan_dq_;
  // attention_backward %q_rows_2, %k_in_order, %v_in_order, %y_second, %dy_rows_2, %lse_second scaled 0.125 diagonal (3 -
  // rank.cp) * (S / 8) + S / 2 -> %dq_second, %dk_second_partial, %dv_second_partial
  hw::AttentionBackwardPlan plan_dq_1_;
  hw::Arena arena_;
  hw::bf16* k_in_order_gathered_ = nullptr;  // %k_in_order_gathered: bf16[4, 2, 2, S/8, 64]
  hw::bf16* v_in_order_gathered_ = nullptr;  // %v_in_order_gathered: bf16[4, 2, 2, S/8, 64]
  hw::bf16* k_in_order_pieces_ = nullptr;    // %k_in_order_pieces: bf16[2, 2, 4, S/8, 64]
  hw::bf16* v_in_order_pieces_ = nullptr;    // %v_in_order_pieces: bf16[2, 2, 4, S/8, 64]
  float* lse_first_ = nullptr;               // %lse_first: f32[4, S/8]
  float* lse_second_ = nullptr;              // %lse_second: f32[4, S/8]
  hw::bf16* dk_first_partial_ = nullptr;     // %dk_first_partial: bf16[2, S/2, 64]
  hw::bf16* dv_first_partial_ = nullptr;     // %dv_first_partial: bf16[2, S/2, 64]
  hw::bf16* dk_second_partial_ = nullptr;    // %dk_second_partial: bf16[2, S, 64]
  hw::bf16* dv_second_partial_ = nullptr;    // %dv_second_partial: bf16[2, S, 64]
  hw::bf16* dk_concat_ = nullptr;            // %dk_concat: bf16[2, 2, S/2, 64]
  hw::bf16* dv_concat_ = nullptr;            // %dv_concat: bf16[2, 2, S/2, 64]
  hw::bf16* dk_resharded_pieces_ = nullptr;  // %dk_resharded_pieces: bf16[4, 2, 2, S/8, 64]
  hw::bf16* dv_resharded_pieces_ = nullptr;  // %dv_resharded_pieces: bf16[4, 2, 2, S/8, 64]
  std::optional<Sizes> prepared_;            // what prepare was last called for
};

}  // namespace programs::trained_in_zigzag
