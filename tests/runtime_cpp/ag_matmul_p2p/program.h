// ag_matmul: y[M, N] = x[M@x, K] @ w[K, N] on mesh(x=8)
#pragma once
#include "runtime.h"

namespace ag_matmul {

inline int64_t D = 8;  // size of mesh axis x; tests change this size

struct Inputs {
  hw::Tensor x;  // bf16[M@x, K]: this rank's M / 8 rows
  hw::Tensor w;  // bf16[K, N]
};
struct Outputs {
  hw::Tensor y;  // bf16[M, N]
};

class Program {
 public:
  explicit Program(hw::Rank& rank);
  // Allocates and plans for these shapes. Every rank prepares before any rank runs.
  void prepare(const Inputs& in);
  // Enqueues the program on `caller`, after earlier work.
  void run(const Inputs& in, const Outputs& out, cudaStream_t caller);

 private:
  hw::Channel& x_;       // the ranks along mesh axis x
  hw::Streams streams_;  // loop[4]
  hw::Matmul matmul_y_;  // matmul %slot, %w -> %y
  hw::Arena arena_;      // %xg
};

}  // namespace ag_matmul
