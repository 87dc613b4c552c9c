#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"

namespace programs::two_stages {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      on_ranks_0_1_(rank.index() < 2),
      on_ranks_2_3_(rank.index() >= 2),
      channel_x_(rank.channel(kMesh, "x", 4)),
      plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 2);
  const int64_t M_x_of_ranks_0_1 = on_ranks_0_1_ ? hw::local_size(M, 2, rank_.index()) : 0;
  const int64_t M_x_of_ranks_2_3 = on_ranks_2_3_ ? hw::local_size(M, 2, rank_.index() - 2) : 0;
  const int64_t K = in.x.global_dim(1, 1);
  const int64_t N = in.w1.global_dim(1, 1);
  if (on_ranks_0_1_) {
    in.x.expect("x", CUDA_R_16BF, {M_x_of_ranks_0_1, K}, rank_.device(), "bf16[local(M, x on ranks 0, 1), K]");
    in.w1.expect("w1", CUDA_R_16BF, {K, N}, rank_.device(), "bf16[K, N]");
  }
  if (on_ranks_2_3_) in.w2.expect("w2", CUDA_R_16BF, {N, K}, rank_.device(), "bf16[N, K]");
  return {M, K, N, M_x_of_ranks_0_1, M_x_of_ranks_2_3};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, M_x_of_ranks_0_1, M_x_of_ranks_2_3] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    if (on_ranks_0_1_) plan_h_.prepare({M_x_of_ranks_0_1, K}, {K, N}, {M_x_of_ranks_0_1, N});
    if (on_ranks_2_3_) plan_y_.prepare({M_x_of_ranks_2_3, N}, {N, K}, {M_x_of_ranks_2_3, K});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    if (on_ranks_0_1_) {
      memory.allocate(h_, N * M_x_of_ranks_0_1);
    }
    if (on_ranks_2_3_) {
      memory.allocate(arrived_, N * M_x_of_ranks_2_3);
    }
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M_x_of_ranks_2_3, K}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, M_x_of_ranks_0_1, M_x_of_ranks_2_3] = *prepared_;
  if (on_ranks_2_3_) out.y.expect("y", CUDA_R_16BF, {M_x_of_ranks_2_3, K}, rank_.device(), "bf16[local(M, x on ranks 2, 3), K]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, M_x_of_ranks_0_1, M_x_of_ranks_2_3] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w1 = in.w1.as<hw::bf16>();
  const auto* w2 = in.w2.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // pipeline.py:17  h = hw.relu(hw.matmul(x, w1)).named("h")
  if (on_ranks_0_1_) {
    HW_CHECK(plan_h_.multiply(x, w1, h_, {caller, workspace_}));
    // pipeline.py:18  arrived = hw.reshard(h, "M@x", "N", mesh=second).named("arrived")
    HW_CHECK(ncclSend(h_, N * M_x_of_ranks_0_1, ncclBfloat16, rank + 2, channel_x_.comm(), caller));
  }
  // pipeline.py:18  arrived = hw.reshard(h, "M@x", "N", mesh=second).named("arrived")
  if (on_ranks_2_3_) {
    HW_CHECK(ncclRecv(arrived_, N * M_x_of_ranks_2_3, ncclBfloat16, rank - 2, channel_x_.comm(), caller));
    // pipeline.py:19  return hw.matmul(arrived, w2)
    HW_CHECK(plan_y_.multiply(arrived_, w2, y, {caller, workspace_}));
  }
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_stages
