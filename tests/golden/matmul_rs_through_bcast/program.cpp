#include "program.h"

#include "hostweave/check.h"

namespace programs::matmul_rs_through_bcast {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 3),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {3, 1, 4, hw::kAny, hw::kAny}, rank_.device(), "bf16[3, 1, 4, m, K]");
  const int64_t m = in.x.dim(3);
  const int64_t K = in.x.dim(4);
  in.w.expect("w", CUDA_R_16BF, {1, K, hw::kAny}, rank_.device(), "bf16[1, K, N]");
  const int64_t N = in.w.dim(2);
  return {m, K, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [m, K, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_.prepare({1, 4, m, K}, {1, 1, K, N}, {1, 4, m, N});
    hw::MemoryPlan memory;
    memory.allocate(matmul_w_, 4 * m * N, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {3, 1, m, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [m, K, N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {3, 1, m, N}, rank_.device(), "bf16[3, 1, m, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [m, K, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // seeds.py:45  partial = hw.sum(hw.matmul(x, w[None, :, None]), axis=1)  # [S, D, m, N]
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * 4 * m * K;
    auto* matmul_w = matmul_w_[i];
    HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w, stream));
    // seeds.py:46  return hw.reshard(partial, S, f"{D}@x", "m", "N").stream(0)
    auto* y_i = y + i * m * N;
    HW_CHECK(ncclReduceScatter(matmul_w, y_i, m * N, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_rs_through_bcast
