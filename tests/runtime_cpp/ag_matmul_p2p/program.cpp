// host @ag_matmul(%x: bf16[M/8, K], %w: bf16[K, N]) -> (%y: bf16[M, N]) mesh(x=8) streams(loop[4]) {
//   %xg = allocate bf16[M, K]
//   fork
//   for %i in 0..8 {
//     %p = (rank.x + %i) % 8
//     stream loop[%i] {
//       %slot = slice %xg[M: %p of 8]
//       if %p == rank.x { copy %x -> %slot }
//       else { group { recv %slot from %p on x;  send %x to (rank.x - %i) % 8 on x } }
//       matmul %slot, %w -> %y[M: %p of 8]
//     }
//   }
//   join
// }
#include "program.h"

namespace ag_matmul {

Program::Program(hw::Rank& rank)
    : x_(rank.channel("x", D)), streams_(rank, 4), matmul_y_(rank, CUDA_R_16BF, CUBLAS_COMPUTE_32F) {}

void Program::prepare(const Inputs& in) {
  const int64_t rows = in.x.dim(0), K = in.x.dim(1), N = in.w.dim(1);
  matmul_y_.plan(rows, K, N);
  arena_.reserve(D * rows * K * sizeof(hw::bf16));
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const int64_t rank = x_.rank();
  const int64_t rows = in.x.dim(0);  // M / 8
  const int64_t K = in.x.dim(1);
  const int64_t N = in.w.dim(1);
  in.x.expect("x", CUDA_R_16BF, {rows, K});
  in.w.expect("w", CUDA_R_16BF, {K, N});
  out.y.expect("y", CUDA_R_16BF, {rows * D, N});

  const auto x = in.x.data<hw::bf16>();
  const auto w = in.w.data<hw::bf16>();
  const auto y = out.y.data<hw::bf16>();
  const auto xg = arena_.at<hw::bf16>(0);

  streams_.fork(caller);
  for (int64_t i = 0; i < D; ++i) {
    const int64_t p = (rank + i) % D;
    const cudaStream_t stream = streams_[i];
    hw::bf16* const slot = xg + p * rows * K;

    if (p == rank) {
      HW_CHECK(cudaMemcpyAsync(slot, x, rows * K * sizeof(hw::bf16), cudaMemcpyDeviceToDevice, stream));
    } else {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError group;
      HW_CHECK(ncclRecv(slot, rows * K, ncclBfloat16, p, x_.comm(), stream));
      HW_CHECK(ncclSend(x, rows * K, ncclBfloat16, (rank - i + D) % D, x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
    HW_CHECK(matmul_y_.cublasLtMatmul(slot, w, y + p * rows * N, streams_.workspace(i), stream));
  }
  streams_.join(caller);
}

}  // namespace ag_matmul
