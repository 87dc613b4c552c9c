// vocabulary on mesh(tp=4). The host IR is in program.hw.
// Compiled with the cost model of NVIDIA H200.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/arena.h"
#include "hostweave/rank.h"
#include "hostweave/streams.h"
#include "hostweave/tensor.h"

namespace programs::vocabulary {

constexpr char kMesh[] = "mesh(tp=4)";
constexpr int64_t kWorld = 4;  // ranks

// Local tensors of one rank.
struct Inputs {
  hw::Tensor table{.dtype = CUDA_R_16BF};  // bf16[local(V, tp), D]
  hw::Tensor ids{.dtype = CUDA_R_32I};     // i32[T]
  hw::Tensor scores{.dtype = CUDA_R_32F};  // f32[local(T, tp), S]
};

struct Outputs {
  hw::Tensor table_taken{.dtype = CUDA_R_16BF};   // bf16[T, D]
  hw::Tensor where_is_past{.dtype = CUDA_R_32F};  // f32[local(T, tp), S]
};

struct OutputShapes {
  hw::Shape table_taken;
  hw::Shape where_is_past;
};

// Sizes determined by the inputs: global dims, and this rank's local size of unevenly sharded dims.
struct Sizes {
  int64_t V;
  int64_t D;
  int64_t T;
  int64_t S;
  int64_t V_tp;
  int64_t T_tp;
  int64_t V_first_tp;
  int64_t T_first_tp;

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
  const hw::Channel& channel_tp_;  // 4 ranks along tp
  hw::Streams comm_;               // comm[1]
  hw::Arena arena_;
  std::optional<Sizes> prepared_;  // sizes of the last call of `prepare`
};

}  // namespace programs::vocabulary
