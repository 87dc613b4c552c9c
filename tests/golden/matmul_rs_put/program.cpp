#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::matmul_rs_put {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4, hw::Transport::peer)),
      loop_(rank, "loop", 1),
      peer_copies_(rank, "peer_copies", 1),
      computed_(3),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF),
      arena_({&channel_x_}) {
  HW_CHECK(hw::load(fused_y));
}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 4);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_x = hw::local_size(K, 4, rank_.index());
  in.x.expect("x", CUDA_R_16BF, {M, K_x}, rank_.device(), "bf16[M, local(K, x)]");
  in.w.expect("w", CUDA_R_16BF, {K_x, hw::kAny}, rank_.device(), "bf16[local(K, x), N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N, K_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, K_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_.prepare({M / 4, K_x}, {K_x, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate_window(y_landing_, M / 4 * 3 * N);
    memory.allocate(matmul_w_, M * N);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M / 4, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, K_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, K_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_with_puts.py:23  return hw.reshard(hw.matmul(x, w), "M@x", "N").stream("M", chunks=D, algorithm="put")
  HW_CHECK(peer_copies_.fork(caller));
  {
    const hw::Stream stream = peer_copies_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.signal((rank_x + 1 + i) % 4, 0, stream));  // peer may write y_landing_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));  // until the peer's y_landing_ may be written
    }
  }
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    auto* matmul_w_i = matmul_w_ + q * (M / 4 * N);
    {
      const hw::Stream stream = loop_[0];
      const auto* x_i = x + q * (M / 4 * K_x);
      HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w_i, stream));
      if (i < 3) {
        HW_CHECK(cudaEventRecord(computed_[i], stream));
      }
    }
    if (i < 3) {
      const hw::Stream stream = peer_copies_[0];
      HW_CHECK(cudaStreamWaitEvent(stream, computed_[i], 0));
      auto* y_landing_by_distance = y_landing_ + i * (M / 4 * N);
      HW_CHECK(cudaMemcpyAsync(arena_.on_peer(channel_x_, q, y_landing_by_distance), matmul_w_i, M / 4 * N * sizeof(hw::bf16),
                               cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(channel_x_.signal(q, 0, stream));  // has written the peer's y_landing_
    }
  }
  {
    const hw::Stream stream = peer_copies_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));  // until the peer has written y_landing_
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(peer_copies_.join(caller));
  auto* matmul_w_own = matmul_w_ + rank_x * (M / 4 * N);
  auto* y_landing_1 = y_landing_ + M / 4 * N;
  auto* y_landing_2 = y_landing_ + M / 2 * N;
  HW_CHECK(hw::launch_pdl(fused_y, hw::grid_of_elements<8>(M / 4 * N), caller, matmul_w_own, y_landing_, y_landing_1, y_landing_2,
                          y, M / 4 * N));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_rs_put
