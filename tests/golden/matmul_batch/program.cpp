#include "program.h"

#include "hostweave/check.h"
#include "hostweave/types.h"

namespace programs::matmul_batch {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), loop_(rank, "loop", 4), plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny, hw::kAny}, rank_.device(), "bf16[B, M, K]");
  const int64_t B = in.x.dim(0);
  const int64_t M = in.x.dim(1);
  const int64_t K = in.x.dim(2);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  return {B, M, K, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [B, M, K, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare({M, K}, {K, N}, {M, N});
    prepared_ = sizes;
  }
  return {.y = {B, M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [B, M, K, N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {B, M, N}, rank_.device(), "bf16[B, M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [B, M, K, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // single_device.py:41  return hw.matmul(x, w).stream("B")  # without chunks: one iteration per index
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < B; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * M * K;
    auto* y_i = y + i * M * N;
    HW_CHECK(plan_y_.multiply(x_i, w, y_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_batch
