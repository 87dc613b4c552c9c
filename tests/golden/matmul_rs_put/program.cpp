// kernel @fused_y(%matmul_w_own: bf16[M/4, N], %y_landing_0: bf16[M/4, N], %y_landing_1: bf16[M/4, N], %y_landing_2: bf16[M/4,
// N]) {
//   %term_0: f32[M/4, N] = astype(%matmul_w_own)
//   %term_1: f32[M/4, N] = astype(%y_landing_0)
//   %term_2: f32[M/4, N] = add(%term_0, %term_1)
//   %term_3: f32[M/4, N] = astype(%y_landing_1)
//   %term_4: f32[M/4, N] = add(%term_2, %term_3)
//   %term_5: f32[M/4, N] = astype(%y_landing_2)
//   %term_6: f32[M/4, N] = add(%term_4, %term_5)
//   %y: bf16[M/4, N] = astype(%term_6)
// }
// host @matmul_rs_put(%x: bf16[M, K@x], %w: bf16[K@x, N]) -> (%y: bf16[M@x, N]) mesh(x=4) channels(x: x peer) streams(ring[1],
// puts[1]) events(made[3]) uneven(K) {
//   %y_landing = allocate_window bf16[3, 1, M/4, N]
//   %matmul_w = allocate_window bf16[M, N]
//   fork puts
//   stream puts[0] {
//     for %i in 0..3 {
//       signal 0 at (rank.x + 1 + %i) % 4 for %y_landing on x
//     }
//     for %i in 0..3 {
//       wait_signal 0 from (rank.x + 1 + %i) % 4 for %y_landing on x
//     }
//   }
//   fork ring
//   for %i in 0..4 {
//     %q = (rank.x + 1 + %i) % 4
//     %matmul_w_i = chunk %matmul_w[0: %q of 4]
//     stream ring[0] {
//       %x_i = chunk %x[0: %q of 4]
//       matmul %x_i, %w -> %matmul_w_i
//       if %q != rank.x {
//         record made[%i]
//       }
//     }
//     if %q != rank.x {
//       stream puts[0] {
//         wait made[%i]
//         %y_landing_by_sender = select %y_landing[0: %i]
//         %y_landing_i = select %y_landing_by_sender[0: 0]
//         put %matmul_w_i -> %y_landing_i at %q signal 0 on x
//       }
//     }
//   }
//   stream puts[0] {
//     for %i in 0..3 {
//       wait_signal 0 from (rank.x + 1 + %i) % 4 for %y_landing on x
//     }
//   }
//   join ring
//   join puts
//   %matmul_w_own = chunk %matmul_w[0: rank.x of 4]
//   %y_landing_shards = reshape %y_landing to [3, M/4, N]
//   %y_landing_0 = select %y_landing_shards[0: 0]
//   %y_landing_1 = select %y_landing_shards[0: 1]
//   %y_landing_2 = select %y_landing_shards[0: 2]
//   launch @fused_y %matmul_w_own, %y_landing_0, %y_landing_1, %y_landing_2 -> %y
// }
#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::matmul_rs_put {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4, hw::Transport::peer)),
      ring_(rank, "ring", 1),
      puts_(rank, "puts", 1),
      made_(3),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF),
      arena_({&channel_x_}) {
  HW_CHECK(hw::load(fused_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", "bf16[M, local(K, x)]", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device());
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 4);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_x = hw::local_size(K, 4, rank_.index());
  in.x.expect("x", "bf16[M, local(K, x)]", CUDA_R_16BF, {M, K_x}, rank_.device());
  in.w.expect("w", "bf16[local(K, x), N]", CUDA_R_16BF, {K_x, hw::kAny}, rank_.device());
  const int64_t N = in.w.dim(1);
  return {M, K, N, K_x};
}

OutputShapes Program::output_shapes(const Inputs& in) const {
  const auto [M, K, N, K_x] = check(in);
  return {.y = {M / 4, N}};
}

void Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  if (prepared_ == sizes) return;
  const auto [M, K, N, K_x] = sizes;
  prepared_.reset();
  plan_matmul_w_.prepare({M / 4, K_x}, {K_x, N}, {M / 4, N});
  hw::MemoryPlan memory;
  memory.allocate_window(y_landing_, M / 4 * 3 * N);
  memory.allocate_window(matmul_w_, M * N);
  arena_.reserve(memory);
  prepared_ = sizes;
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const Sizes sizes = check(in);
  hw::expect_prepared(prepared_ == sizes);
  const auto [M, K, N, K_x] = sizes;
  out.y.expect("y", "bf16[M/4, N]", CUDA_R_16BF, {M / 4, N}, rank_.device());

  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // one_sided_programs.py:23  return hw.reshard(hw.matmul(x, w), "M@x", "N").stream("M", chunks=D, algorithm="put")
  HW_CHECK(puts_.fork(caller));
  {
    const hw::Stream stream = puts_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.signal((rank_x + 1 + i) % 4, 0, stream));
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));
    }
  }
  HW_CHECK(ring_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    auto* matmul_w_i = matmul_w_ + q * (M / 4 * N);
    {
      const hw::Stream stream = ring_[0];
      const auto* x_i = x + q * (M / 4 * K_x);
      HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w_i, stream));
      if (q != rank_x) {
        HW_CHECK(cudaEventRecord(made_[i], stream));
      }
    }
    if (q != rank_x) {
      const hw::Stream stream = puts_[0];
      HW_CHECK(cudaStreamWaitEvent(stream, made_[i], 0));
      auto* y_landing_by_sender = y_landing_ + i * (M / 4 * N);
      HW_CHECK(cudaMemcpyAsync(arena_.on_peer(channel_x_, q, y_landing_by_sender), matmul_w_i, M / 4 * N * sizeof(hw::bf16),
                               cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(channel_x_.signal(q, 0, stream));
    }
  }
  {
    const hw::Stream stream = puts_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));
    }
  }
  HW_CHECK(ring_.join(caller));
  HW_CHECK(puts_.join(caller));
  auto* matmul_w_own = matmul_w_ + rank_x * (M / 4 * N);
  auto* y_landing_1 = y_landing_ + M / 4 * N;
  auto* y_landing_2 = y_landing_ + M / 2 * N;
  HW_CHECK(hw::launch_pdl(fused_y, hw::grid_of_elements<8>(M / 4 * N), caller, hw::reads(matmul_w_own, M / 4 * N),
                          hw::reads(y_landing_, M / 4 * N), hw::reads(y_landing_1, M / 4 * N), hw::reads(y_landing_2, M / 4 * N),
                          hw::writes(y, M / 4 * N), M, N));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_rs_put
