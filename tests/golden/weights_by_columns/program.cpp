#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"

namespace programs::weights_by_columns {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_dp_(rank.channel(kMesh, "dp", 4, hw::Transport::peer)),
      comm_(rank, "comm", 1),
      all_up_ready_(1),
      all_down_ready_(1),
      plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF),
      arena_({&channel_dp_}) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 4);
  const int64_t M_dp = hw::local_size(M, 4, rank_.index());
  const int64_t K = in.x.dim(1);
  hw::expect_divisible("K", K, 4);
  in.x.expect("x", CUDA_R_16BF, {M_dp, K}, rank_.device(), "bf16[local(M, dp), K]");
  in.up.expect("up", CUDA_R_16BF, {hw::kAny, K}, rank_.device(), "bf16[N/4, K]");
  const int64_t N = in.up.dim(0) * 4;
  in.down.expect("down", CUDA_R_16BF, {N, K / 4}, rank_.device(), "bf16[N, K/4]");
  return {M, K, N, M_dp};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, M_dp] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_h_.prepare({M_dp, K}, hw::Strided({K, N / 4}, {1, K}), hw::Strided({M_dp, N / 4}, {N, 1}));
    plan_y_.prepare({M_dp, N}, {N, K / 4}, hw::Strided({M_dp, K / 4}, {K, 1}));
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    memory.allocate_window(all_up_, K * N);
    memory.allocate_window(all_down_, K * N);
    memory.allocate(h_, N * M_dp);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M_dp, K}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, M_dp] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M_dp, K}, rank_.device(), "bf16[local(M, dp), K]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, M_dp] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* up = in.up.as<hw::bf16>();
  const auto* down = in.down.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_dp = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // test_golden.py:35  h = hw.relu(hw.matmul(x, hw.reshard(up, "N", "K").named("all_up").T))
  HW_CHECK(comm_.fork(caller));
  {
    const hw::Stream stream = comm_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.signal((rank_dp + 1 + i) % 4, 0, stream));  // peer may write all_up_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.wait_signal((rank_dp + 1 + i) % 4, 0, stream));  // until the peer's all_up_ may be written
    }
    auto* all_up_block = all_up_ + rank_dp * (K / 4 * N);
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(cudaMemcpyAsync(arena_.on_peer(channel_dp_, (rank_dp + 1 + i) % 4, all_up_block), up, K / 4 * N * sizeof(hw::bf16),
                               cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(channel_dp_.signal((rank_dp + 1 + i) % 4, 0, stream));  // has written the peer's all_up_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.wait_signal((rank_dp + 1 + i) % 4, 0, stream));  // until the peer has written all_up_
    }
    HW_CHECK(cudaEventRecord(all_up_ready_[0], stream));
    // test_golden.py:36  return x + hw.matmul(h, hw.reshard(down, "N", "K").named("all_down"))
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.signal((rank_dp + 1 + i) % 4, 0, stream));  // peer may write all_down_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.wait_signal((rank_dp + 1 + i) % 4, 0, stream));  // until the peer's all_down_ may be written
    }
    auto* all_down_block = all_down_ + rank_dp * (K / 4 * N);
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(cudaMemcpyAsync(arena_.on_peer(channel_dp_, (rank_dp + 1 + i) % 4, all_down_block), down,
                               K / 4 * N * sizeof(hw::bf16), cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(channel_dp_.signal((rank_dp + 1 + i) % 4, 0, stream));  // has written the peer's all_down_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_dp_.wait_signal((rank_dp + 1 + i) % 4, 0, stream));  // until the peer has written all_down_
    }
    HW_CHECK(cudaEventRecord(all_down_ready_[0], stream));
  }
  // test_golden.py:35  h = hw.relu(hw.matmul(x, hw.reshard(up, "N", "K").named("all_up").T))
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_dp + i) % 4;
    if (i == 1) {
      HW_CHECK(cudaStreamWaitEvent(caller, all_up_ready_[0], 0));
    }
    auto* all_up_i = all_up_ + p * (K / 4 * N);
    const auto* up_chunk = i == 0 ? up : all_up_i;
    auto* h_i = h_ + p * (N / 4);
    HW_CHECK(plan_h_.multiply(x, up_chunk, h_i, {caller, workspace_}));
  }
  // test_golden.py:36  return x + hw.matmul(h, hw.reshard(down, "N", "K").named("all_down"))
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_dp + i) % 4;
    if (i == 1) {
      HW_CHECK(cudaStreamWaitEvent(caller, all_down_ready_[0], 0));
    }
    auto* all_down_i = all_down_ + p * (K / 4 * N);
    const auto* x_i = x + p * (K / 4);
    auto* y_i = y + p * (K / 4);
    const auto* down_chunk = i == 0 ? down : all_down_i;
    HW_CHECK(plan_y_.multiply(h_, down_chunk, y_i, {caller, workspace_}, {.accumulate = x_i}));
  }
  HW_CHECK(comm_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::weights_by_columns
