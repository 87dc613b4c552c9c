#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"

namespace programs::two_stages_streamed {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      on_ranks_0_1_(rank.index() < 2),
      on_ranks_2_3_(rank.index() >= 2),
      channel_x_of_ranks_0_1_(on_ranks_0_1_ ? rank.channel("mesh(x=2 of ranks 0, 1)", "x", 2) : hw::no_channel()),
      channel_x_(rank.channel(kMesh, "x", 4)),
      channel_x_of_ranks_2_3_(on_ranks_2_3_ ? rank.channel("mesh(x=2 of ranks 2, 3)", "x", 2) : hw::no_channel()),
      loop_(rank, "loop", 4),
      channels_idle_(1),
      plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU),
      plan_matmul_down1_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_g_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 1);
  hw::expect_divisible("M", M, 4);
  const int64_t K = in.x.global_dim(1, 1);
  const int64_t N = in.up1.global_dim(1, 2);
  const int64_t N_x_of_ranks_0_1 = on_ranks_0_1_ ? hw::local_size(N, 2, rank_.index()) : 0;
  const int64_t N_x_of_ranks_2_3 = on_ranks_2_3_ ? hw::local_size(N, 2, rank_.index() - 2) : 0;
  if (on_ranks_0_1_) {
    in.x.expect("x", CUDA_R_16BF, {M, K}, rank_.device(), "bf16[M, K]");
    in.up1.expect("up1", CUDA_R_16BF, {K, N_x_of_ranks_0_1}, rank_.device(), "bf16[K, local(N, x on ranks 0, 1)]");
    in.down1.expect("down1", CUDA_R_16BF, {N_x_of_ranks_0_1, K}, rank_.device(), "bf16[local(N, x on ranks 0, 1), K]");
  }
  if (on_ranks_2_3_) {
    in.up2.expect("up2", CUDA_R_16BF, {K, N_x_of_ranks_2_3}, rank_.device(), "bf16[K, local(N, x on ranks 2, 3)]");
    in.down2.expect("down2", CUDA_R_16BF, {N_x_of_ranks_2_3, K}, rank_.device(), "bf16[local(N, x on ranks 2, 3), K]");
  }
  return {M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    if (on_ranks_0_1_) {
      plan_h_.prepare({M / 4, K}, {K, N_x_of_ranks_0_1}, {M / 4, N_x_of_ranks_0_1});
      plan_matmul_down1_.prepare({M / 4, N_x_of_ranks_0_1}, {N_x_of_ranks_0_1, K}, {M / 4, K});
    }
    if (on_ranks_2_3_) {
      plan_g_.prepare({M / 4, K}, {K, N_x_of_ranks_2_3}, {M / 4, N_x_of_ranks_2_3});
      plan_y_.prepare({M / 4, N_x_of_ranks_2_3}, {N_x_of_ranks_2_3, K}, {M / 4, K});
    }
    hw::MemoryPlan memory;
    if (on_ranks_2_3_) {
      memory.allocate(arrived_, M * K);
      memory.allocate(g_, M / 4 * N_x_of_ranks_2_3, loop_);
    }
    if (on_ranks_0_1_) {
      memory.allocate(h_, M / 4 * N_x_of_ranks_0_1, loop_);
      memory.allocate(matmul_down1_, M / 4 * K, loop_);
    }
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, K}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = *prepared_;
  if (on_ranks_2_3_) out.y.expect("y", CUDA_R_16BF, {M, K}, rank_.device(), "bf16[M, K]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* up1 = in.up1.as<hw::bf16>();
  const auto* down1 = in.down1.as<hw::bf16>();
  const auto* up2 = in.up2.as<hw::bf16>();
  const auto* down2 = in.down2.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // pipeline.py:31  h = hw.relu(hw.matmul(x, up1).stream("M", chunks=S)).named("h").stream("M", chunks=S)
  HW_CHECK(loop_.fork(caller));
  if (on_ranks_0_1_) {
    for (int64_t i = 0; i < 4; ++i) {
      const hw::Stream stream = loop_[i];
      const auto* x_i = x + i * (M / 4 * K);
      auto* h = h_[i];
      HW_CHECK(plan_h_.multiply(x_i, up1, h, stream));
      // pipeline.py:32  layer = hw.reshard(hw.matmul(h, down1), "M", "K").named("layer").stream("M", chunks=S)
      auto* matmul_down1 = matmul_down1_[i];
      HW_CHECK(plan_matmul_down1_.multiply(h, down1, matmul_down1, stream));
      if (i != 0) {
        HW_CHECK(cudaStreamWaitEvent(stream, channels_idle_[0], 0));
      }
      HW_CHECK(
          ncclAllReduce(matmul_down1, matmul_down1, M / 4 * K, ncclBfloat16, ncclSum, channel_x_of_ranks_0_1_.comm(), stream));
      // pipeline.py:33  arrived = hw.reshard(layer, "M", "K", mesh=second).named("arrived").stream("M", chunks=S)
      HW_CHECK(ncclSend(matmul_down1, M / 4 * K, ncclBfloat16, rank + 2, channel_x_.comm(), stream));
      HW_CHECK(cudaEventRecord(channels_idle_[0], stream));
    }
  }
  // pipeline.py:33  arrived = hw.reshard(layer, "M", "K", mesh=second).named("arrived").stream("M", chunks=S)
  if (on_ranks_2_3_) {
    {
      const hw::Stream stream = loop_[0];
      HW_CHECK(ncclRecv(arrived_, M / 4 * K, ncclBfloat16, rank - 2, channel_x_.comm(), stream));
      HW_CHECK(cudaEventRecord(channels_idle_[0], stream));
    }
    for (int64_t i = 0; i < 4; ++i) {
      if (i < 3) {
        const hw::Stream stream = loop_[i + 1];
        HW_CHECK(cudaStreamWaitEvent(stream, channels_idle_[0], 0));
        auto* arrived_next = arrived_ + (i + 1) * (M / 4 * K);
        HW_CHECK(ncclRecv(arrived_next, M / 4 * K, ncclBfloat16, rank - 2, channel_x_.comm(), stream));
        HW_CHECK(cudaEventRecord(channels_idle_[0], stream));
      }
      // pipeline.py:34  g = hw.relu(hw.matmul(arrived, up2).stream("M", chunks=S)).named("g").stream("M", chunks=S)
      const hw::Stream stream = loop_[i];
      auto* arrived_i = arrived_ + i * (M / 4 * K);
      auto* g = g_[i];
      HW_CHECK(plan_g_.multiply(arrived_i, up2, g, stream));
      // pipeline.py:35  return hw.reshard(hw.matmul(g, down2), "M", "K").stream("M", chunks=S)
      auto* y_i = y + i * (M / 4 * K);
      HW_CHECK(plan_y_.multiply(g, down2, y_i, stream));
      HW_CHECK(cudaStreamWaitEvent(stream, channels_idle_[0], 0));
      HW_CHECK(ncclAllReduce(y_i, y_i, M / 4 * K, ncclBfloat16, ncclSum, channel_x_of_ranks_2_3_.comm(), stream));
      HW_CHECK(cudaEventRecord(channels_idle_[0], stream));
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_stages_streamed
