// epilogues: (x: bf16[M@x, K], w: bf16[K, N], b: bf16[N], r: bf16[M@x, N]) -> (h: bf16[M, N], s: bf16[M@x, N], c: bf16[M@x, N])
// on mesh(x=4)
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

namespace programs::epilogues {

constexpr char kMesh[] = "mesh(x=4)";
constexpr int64_t kWorld = 4;  // ranks

// What one rank holds.
struct Inputs {
  hw::Tensor x{.dtype = CUDA_R_16BF};  // bf16[M/4, K]
  hw::Tensor w{.dtype = CUDA_R_16BF};  // bf16[K, N]
  hw::Tensor b{.dtype = CUDA_R_16BF};  // bf16[N]
  hw::Tensor r{.dtype = CUDA_R_16BF};  // bf16[M/4, N]
};

struct Outputs {
  hw::Tensor h{.dtype = CUDA_R_16BF};  // bf16[M, N]
  hw::Tensor s{.dtype = CUDA_R_16BF};  // bf16[M/4, N]
  hw::Tensor c{.dtype = CUDA_R_16BF};  // bf16[M/4, N]
};

struct OutputShapes {
  hw::Shape h;
  hw::Shape s;
  hw::Shape c;
};

// Global sizes, by the names that the program gives them.
struct Sizes {
  int64_t M;
  int64_t K;
  int64_t N;

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
  const hw::Channel& channel_x_;  // the 4 ranks along x
  hw::Streams ring_;              // ring[4]
  hw::MatmulPlan plan_h_;         // matmul %x_chunk, %w bias %b activation relu -> %h_i
  hw::MatmulPlan plan_s_;         // matmul %x, %w scaled 0.5 accumulate %r -> %s
  hw::Arena arena_;
  char* workspace_ = nullptr;              // of the matmuls on the caller's stream
  std::array<hw::bf16*, 4> x_gathered_{};  // %x_gathered: bf16[M/4, K], one a stream
  std::optional<Sizes> prepared_;          // what prepare was last called for
};

}  // namespace programs::epilogues
