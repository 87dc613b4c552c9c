#include "program.h"

#include "hostweave/check.h"
#include "hostweave/collectives.h"
#include "hostweave/index.h"

namespace programs::weights_gradient {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), channel_x_(rank.channel(kMesh, "x", 4)), plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 4);
  const int64_t M_x = hw::local_size(M, 4, rank_.index());
  const int64_t K = in.x.dim(1);
  in.x.expect("x", CUDA_R_16BF, {M_x, K}, rank_.device(), "bf16[local(M, x), K]");
  const int64_t N = in.dh.global_dim(1, 4);
  const int64_t N_x = hw::local_size(N, 4, rank_.index());
  in.dh.expect("dh", CUDA_R_16BF, {M, N_x}, rank_.device(), "bf16[M, local(N, x)]");
  return {M, K, N, M_x, N_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, M_x, N_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare(hw::Strided({K, M}, {1, K}), {M, N_x}, {K, N_x});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    memory.allocate(x_gathered_, M * K);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {K, N_x}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, M_x, N_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {K, N_x}, rank_.device(), "bf16[K, local(N, x)]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, M_x, N_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* dh = in.dh.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // test_golden.py:42  return hw.matmul(x.T, dh)
  HW_CHECK(hw::all_gather(x, x_gathered_, {M, K}, ncclBfloat16, channel_x_, caller));
  HW_CHECK(plan_y_.multiply(x_gathered_, dh, y, {caller, workspace_}));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::weights_gradient
