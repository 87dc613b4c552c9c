// kernel @relu_h(%product: bf16[M/2, N]) {
//   %h: bf16[M/2, N] = relu(%product)
// }  # ends here: send uses %h
// host @two_stages(%x: bf16[M@x, K] on mesh(x=2 of ranks 0, 1), %w1: bf16[K, N] on mesh(x=2 of ranks 0, 1), %w2: bf16[N, K] on
// mesh(x=2 of ranks 2, 3)) -> (%y: bf16[M@x, K] on mesh(x=2 of ranks 2, 3)) mesh(x=4) {
//   on mesh(x=2 of ranks 0, 1) {
//     %product = allocate bf16[M/2, N]
//     matmul %x, %w1 -> %product
//     %h = allocate bf16[M/2, N]
//     launch @relu_h %product -> %h
//     send %h to rank + 2 on *
//   }
//   on mesh(x=2 of ranks 2, 3) {
//     %arrived = allocate bf16[M/2, N]
//     recv %arrived from rank - 2 on *
//     matmul %arrived, %w2 -> %y
//   }
// }
#include "program.h"

#include "hostweave/check.h"
#include "kernels.h"

namespace programs::two_stages {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      on_ranks_0_1_(rank.index() < 2),
      on_ranks_2_3_(rank.index() >= 2),
      team_x_(rank.channel(kMesh, "x", 4)),
      plan_product_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(relu_h));
}

Sizes Program::check(const Inputs& in) const {
  if (on_ranks_0_1_) in.x.expect("x", "bf16[M/2, K]", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device());
  const int64_t M = in.x.whole_dim(0, 2);
  hw::expect_divisible("M", M, 2);
  const int64_t K = in.x.whole_dim(1, 1);
  if (on_ranks_0_1_) in.x.expect("x", "bf16[M/2, K]", CUDA_R_16BF, {M / 2, K}, rank_.device());
  if (on_ranks_0_1_) in.w1.expect("w1", "bf16[K, N]", CUDA_R_16BF, {K, hw::kAny}, rank_.device());
  const int64_t N = in.w1.whole_dim(1, 1);
  if (on_ranks_0_1_) in.w1.expect("w1", "bf16[K, N]", CUDA_R_16BF, {K, N}, rank_.device());
  if (on_ranks_2_3_) in.w2.expect("w2", "bf16[N, K]", CUDA_R_16BF, {N, K}, rank_.device());
  return {M, K, N};
}

OutputShapes Program::output_shapes(const Inputs& in) const {
  const auto [M, K, N] = check(in);
  return {.y = {M / 2, K}};
}

void Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  if (prepared_ == sizes) return;
  const auto [M, K, N] = sizes;
  prepared_.reset();
  if (on_ranks_0_1_) plan_product_.prepare({M / 2, K}, {K, N}, {M / 2, N});
  if (on_ranks_2_3_) plan_y_.prepare({M / 2, N}, {N, K}, {M / 2, K});
  hw::MemoryPlan memory;
  memory.allocate(workspace_, hw::kWorkspaceBytes);
  if (on_ranks_0_1_) {
    memory.allocate(product_, M / 2 * N);
    memory.allocate(h_, M / 2 * N);
  }
  if (on_ranks_2_3_) {
    memory.allocate(arrived_, M / 2 * N);
  }
  arena_.reserve(memory);
  prepared_ = sizes;
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const Sizes sizes = check(in);
  hw::expect_prepared(prepared_ == sizes);
  const auto [M, K, N] = sizes;
  if (on_ranks_2_3_) out.y.expect("y", "bf16[M/2, K]", CUDA_R_16BF, {M / 2, K}, rank_.device());

  const auto* x = in.x.as<hw::bf16>();
  const auto* w1 = in.w1.as<hw::bf16>();
  const auto* w2 = in.w2.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  if (on_ranks_0_1_) {
    HW_CHECK(plan_product_.cublasLtMatmul(x, w1, product_, {caller, workspace_}));
    HW_CHECK(hw::launch(relu_h, hw::grid_for(M / 2 * N), hw::kBlock, caller, hw::reads(product_, M / 2 * N),
                        hw::writes(h_, M / 2 * N), M, N));
    HW_CHECK(ncclSend(h_, M / 2 * N, ncclBfloat16, rank + 2, team_x_.comm(), caller));
  }
  if (on_ranks_2_3_) {
    HW_CHECK(ncclRecv(arrived_, M / 2 * N, ncclBfloat16, rank - 2, team_x_.comm(), caller));
    HW_CHECK(plan_y_.cublasLtMatmul(arrived_, w2, y, {caller, workspace_}));
  }
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_stages
