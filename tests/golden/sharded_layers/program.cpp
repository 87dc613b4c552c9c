#include "program.h"

#include "hostweave/check.h"
#include "hostweave/collectives.h"
#include "hostweave/group.h"
#include "hostweave/index.h"

namespace programs::sharded_layers {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_dp_(rank.channel(kMesh, "dp", 4)),
      comm_(rank, "comm", 1),
      gathered_ready_(1),
      plan_relu_up_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 4);
  const int64_t M_dp = hw::local_size(M, 4, rank_.index());
  const int64_t E = in.x.dim(1);
  const int64_t E_dp = hw::local_size(E, 4, rank_.index());
  in.x.expect("x", CUDA_R_16BF, {M_dp, E}, rank_.device(), "bf16[local(M, dp), E]");
  const int64_t F = in.sharded_layers[0].up.dim(1);
  const int64_t F_dp = hw::local_size(F, 4, rank_.index());
  for (int64_t member = 0; member < 4; ++member) {
    const auto& each = in.sharded_layers[member];
    each.up.expect({"up_", member}, CUDA_R_16BF, {E_dp, F}, rank_.device(), "bf16[local(E, dp), F]");
    each.down.expect({"down_", member}, CUDA_R_16BF, {F_dp, E}, rank_.device(), "bf16[local(F, dp), E]");
  }
  return {M, E, F, M_dp, E_dp, F_dp};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, E, F, M_dp, E_dp, F_dp] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_relu_up_.prepare({M_dp, E}, {E, F}, {M_dp, F});
    plan_y_.prepare({M_dp, F}, {F, E}, {M_dp, E});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    memory.allocate(up_gathered_, 2 * E * F);
    memory.allocate(down_gathered_, 2 * E * F);
    memory.allocate(y_other_, E * M_dp);
    sharded_layer_memory(sizes, memory);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M_dp, E}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, E, F, M_dp, E_dp, F_dp] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M_dp, E}, rank_.device(), "bf16[local(M, dp), E]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, E, F, M_dp, E_dp, F_dp] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // test_golden.py:65  x = sharded_layer(x, weights[f"up_{i}"], weights[f"down_{i}"])
  HW_CHECK(comm_.fork(caller));
  {
    const hw::Stream stream = comm_[0];
    {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(hw::all_gather(in.sharded_layers[0].up.as<hw::bf16>(), up_gathered_, {E, F}, ncclBfloat16, channel_dp_, stream));
      HW_CHECK(
          hw::all_gather(in.sharded_layers[0].down.as<hw::bf16>(), down_gathered_, {F, E}, ncclBfloat16, channel_dp_, stream));
      HW_CHECK(ncclGroupEnd());
    }
    HW_CHECK(cudaEventRecord(gathered_ready_[0], stream));
  }
  for (int64_t i = 0; i < 4; ++i) {
    HW_CHECK(cudaStreamWaitEvent(caller, gathered_ready_[0], 0));
    if (i < 3) {
      HW_CHECK(comm_.fork(caller));
      const hw::Stream stream = comm_[0];
      auto* up_gathered_next = up_gathered_ + ((i + 1) % 2) * E * F;
      auto* down_gathered_next = down_gathered_ + ((i + 1) % 2) * E * F;
      {
        HW_CHECK(ncclGroupStart());
        const hw::CloseGroupOnError guard;
        HW_CHECK(hw::all_gather(in.sharded_layers[i + 1].up.as<hw::bf16>(), up_gathered_next, {E, F}, ncclBfloat16, channel_dp_,
                                stream));
        HW_CHECK(hw::all_gather(in.sharded_layers[i + 1].down.as<hw::bf16>(), down_gathered_next, {F, E}, ncclBfloat16,
                                channel_dp_, stream));
        HW_CHECK(ncclGroupEnd());
      }
      HW_CHECK(cudaEventRecord(gathered_ready_[0], stream));
    }
    auto* y_before = i % 2 == 0 ? y : y_other_;
    auto* y_i = i % 2 == 0 ? y_other_ : y;
    const auto* x_i = i == 0 ? x : y_before;
    sharded_layer(x_i, up_gathered_ + (i % 2) * E * F, down_gathered_ + (i % 2) * E * F, y_i, caller);
  }
  HW_CHECK(arena_.end_call(caller));
}

void Program::sharded_layer(const hw::bf16* x, const hw::bf16* up, const hw::bf16* down, hw::bf16* y, cudaStream_t caller) {
  const hw::Range range("sharded_layer");
  // test_golden.py:54  return x + hw.matmul(hw.relu(hw.matmul(x, hw.reshard(up, "E", "F"))), hw.reshard(down, "F", ...
  HW_CHECK(plan_relu_up_.multiply(x, up, sharded_layer_relu_up_, {caller, workspace_}));
  HW_CHECK(plan_y_.multiply(sharded_layer_relu_up_, down, y, {caller, workspace_}, {.accumulate = x}));
}

void Program::sharded_layer_memory(const Sizes& sizes, hw::MemoryPlan& memory) {
  const auto [M, E, F, M_dp, E_dp, F_dp] = sizes;
  memory.allocate(sharded_layer_relu_up_, F * M_dp);
  memory.free(sharded_layer_relu_up_);
}

}  // namespace programs::sharded_layers
