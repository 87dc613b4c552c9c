#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::two_loops {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_matmul_v_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_matmul_u_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(maximum_minimum_g));
  HW_CHECK(hw::load(sum_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  const int64_t K = in.x.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  const int64_t F = in.v.global_dim(1, 4);
  const int64_t F_x = hw::local_size(F, 4, rank_.index());
  in.v.expect("v", CUDA_R_16BF, {N, F_x}, rank_.device(), "bf16[N, local(F, x)]");
  in.u.expect("u", CUDA_R_16BF, {F_x, N}, rank_.device(), "bf16[local(F, x), N]");
  return {M, K, N, F, F_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, F, F_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_h_.prepare({M / 4, K}, {K, N}, {M / 4, N});
    plan_matmul_v_.prepare({M, N}, {N, F_x}, {M, F_x});
    plan_matmul_u_.prepare({M / 4, F_x}, {F_x, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    // The live ranges of these buffers are disjoint, so they may share bytes:
    // - h_, y_landing_
    // - x_gathered_, matmul_v_
    memory.allocate(h_, M * N);
    memory.allocate(x_gathered_, M / 4 * K, loop_);
    memory.join(loop_);
    memory.allocate(matmul_v_, M * F_x);
    memory.free(h_);
    memory.allocate(y_landing_, M * N);
    memory.allocate(matmul_u_, M / 4 * N, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M / 4, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, F, F_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, F, F_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  const auto* v = in.v.as<hw::bf16>();
  const auto* u = in.u.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:81  h = hw.matmul(x, w).stream("M", chunks=D)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* x_gathered = x_gathered_[i];
    if (i != 0) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(x_gathered, M / 4 * K, ncclBfloat16, p, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(x, M / 4 * K, ncclBfloat16, (rank_x - i + 4) % 4, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
    auto* h_i = h_ + p * (M / 4 * N);
    const auto* x_chunk = i == 0 ? x : x_gathered;
    HW_CHECK(plan_h_.multiply(x_chunk, w, h_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  // fusions_beyond_examples.py:82  g = hw.clip(hw.matmul(h, v), -1, 1)
  HW_CHECK(plan_matmul_v_.multiply(h_, v, matmul_v_, {caller, workspace_}));
  HW_CHECK(hw::launch_pdl(maximum_minimum_g, hw::grid_of_elements<8>(M * F_x), caller, matmul_v_, matmul_v_, M * F_x));
  // fusions_beyond_examples.py:83  return hw.reshard(hw.matmul(g, u), "M@x", "N").stream("M", chunks=D)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* g_i = matmul_v_ + q * (M / 4 * F_x);
    auto* matmul_u = matmul_u_[i];
    const int64_t sender = (rank_x - i + 3) % 4;
    auto* y_landing_i = y_landing_ + sender * (M / 4 * N);
    auto* matmul_u_chunk = i >= 3 ? y_landing_i : matmul_u;
    HW_CHECK(plan_matmul_u_.multiply(g_i, u, matmul_u_chunk, stream));
    if (i < 3) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(y_landing_i, M / 4 * N, ncclBfloat16, sender, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(matmul_u, M / 4 * N, ncclBfloat16, q, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(hw::launch_pdl(sum_y, hw::grid_of_elements<8>(M / 4 * N), caller, y_landing_, y, M, N));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_loops
