#include "program.h"

#include "hostweave/check.h"

namespace programs::ag_matmul_put {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4, hw::Transport::peer)),
      loop_(rank, "loop", 2),
      peer_copies_(rank, "peer_copies", 1),
      arrived_(4),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF),
      arena_({&channel_x_}) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  const int64_t K = in.x.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare({M / 4, K}, {K, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate_window(x_gathered_, M * K);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_with_puts.py:12  return hw.matmul(x, w).stream("M", chunks=D, algorithm="put")
  HW_CHECK(peer_copies_.fork(caller));
  {
    const hw::Stream stream = peer_copies_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.signal((rank_x + 1 + i) % 4, 0, stream));  // peer may write x_gathered_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));  // until the peer's x_gathered_ may be written
    }
  }
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    auto* x_gathered_i = x_gathered_ + p * (M / 4 * K);
    if (i != 0) {
      const hw::Stream stream = peer_copies_[0];
      auto* x_gathered_own = x_gathered_ + rank_x * (M / 4 * K);
      HW_CHECK(cudaMemcpyAsync(arena_.on_peer(channel_x_, (rank_x - i + 4) % 4, x_gathered_own), x, M / 4 * K * sizeof(hw::bf16),
                               cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(channel_x_.signal((rank_x - i + 4) % 4, 0, stream));  // has written the peer's x_gathered_
      HW_CHECK(channel_x_.wait_signal(p, 0, stream));                // until the peer has written x_gathered_
      HW_CHECK(cudaEventRecord(arrived_[i], stream));
    }
    const hw::Stream stream = loop_[i];
    if (i != 0) {
      HW_CHECK(cudaStreamWaitEvent(stream, arrived_[i], 0));
    }
    auto* y_i = y + p * (M / 4 * N);
    const auto* x_chunk = i == 0 ? x : x_gathered_i;
    HW_CHECK(plan_y_.multiply(x_chunk, w, y_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(peer_copies_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::ag_matmul_put
