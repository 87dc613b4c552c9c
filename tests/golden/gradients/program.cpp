#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "hostweave/types.h"
#include "kernels.h"

namespace programs::gradients {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      comm_(rank, "comm", 1),
      plan_dw_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_dx_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(sum_db_partial));
}

Sizes Program::check(const Inputs& in) const {
  const int64_t T = in.x.global_dim(0, 4);
  const int64_t T_x = hw::local_size(T, 4, rank_.index());
  const int64_t K = in.x.dim(1);
  in.x.expect("x", CUDA_R_16BF, {T_x, K}, rank_.device(), "bf16[local(T, x), K]");
  in.dy.expect("dy", CUDA_R_16BF, {T_x, hw::kAny}, rank_.device(), "bf16[local(T, x), N]");
  const int64_t N = in.dy.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, N}, rank_.device(), "bf16[K, N]");
  return {T, K, N, T_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [T, K, N, T_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_dw_.prepare(hw::Strided({K, T_x}, {1, K}), {T_x, N}, {K, N});
    plan_dx_.prepare({T_x, N}, hw::Strided({N, K}, {1, N}), {T_x, K});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.dx = {T_x, K}, .dw = {K, N}, .db = {N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [T, K, N, T_x] = *prepared_;
  out.dx.expect("dx", CUDA_R_16BF, {T_x, K}, rank_.device(), "bf16[local(T, x), K]");
  out.dw.expect("dw", CUDA_R_16BF, {K, N}, rank_.device(), "bf16[K, N]");
  out.db.expect("db", CUDA_R_16BF, {N}, rank_.device(), "bf16[N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [T, K, N, T_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* dy = in.dy.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* dx = out.dx.as<hw::bf16>();
  auto* dw = out.dw.as<hw::bf16>();
  auto* db = out.db.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:66  dw = hw.matmul(x.T, dy).named("dw")
  HW_CHECK(plan_dw_.multiply(x, dy, dw, {caller, workspace_}));
  HW_CHECK(comm_.fork(caller));
  {
    const hw::Stream stream = comm_[0];
    HW_CHECK(ncclAllReduce(dw, dw, K * N, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  // fusions_beyond_examples.py:67  db = hw.sum(dy, axis=0).named("db")
  HW_CHECK(hw::launch_pdl(sum_db_partial, hw::grid_of_columns(N, 512), caller, dy, db, N, T_x));
  HW_CHECK(comm_.fork(caller));
  {
    const hw::Stream stream = comm_[0];
    HW_CHECK(ncclAllReduce(db, db, N, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  // fusions_beyond_examples.py:68  return hw.matmul(dy, w.T).named("dx"), dw, db
  HW_CHECK(plan_dx_.multiply(dy, w, dx, {caller, workspace_}));
  HW_CHECK(comm_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::gradients
