#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"

namespace programs::matmul_ar_two_axes {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_tp_(rank.channel(kMesh, "tp", 4)),
      loop_(rank, "loop", 2),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 2);
  const int64_t M_dp = hw::local_size(M, 2, rank_.index() / 4);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_tp = hw::local_size(K, 4, rank_.index() % 4);
  in.x.expect("x", CUDA_R_16BF, {M_dp, K_tp}, rank_.device(), "bf16[local(M, dp), local(K, tp)]");
  in.w.expect("w", CUDA_R_16BF, {K_tp, hw::kAny}, rank_.device(), "bf16[local(K, tp), N]");
  const int64_t N = in.w.dim(1);
  hw::expect_divisible("N", N, 2);
  return {M, K, N, M_dp, K_tp};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, M_dp, K_tp] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_.prepare({M_dp, K_tp}, hw::Strided({K_tp, N / 2}, {N, 1}), {M_dp, N / 2});
    hw::MemoryPlan memory;
    memory.allocate(matmul_w_, N / 2 * M_dp, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M_dp, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, M_dp, K_tp] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M_dp, N}, rank_.device(), "bf16[local(M, dp), N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, M_dp, K_tp] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:33  return hw.reshard(hw.matmul(x, w), "M@dp", "N").stream("N", chunks=2)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 2; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* w_i = w + i * (N / 2);
    auto* matmul_w = matmul_w_[i];
    HW_CHECK(plan_matmul_w_.multiply(x, w_i, matmul_w, stream));
    HW_CHECK(ncclAllReduce(matmul_w, matmul_w, N / 2 * M_dp, ncclBfloat16, ncclSum, channel_tp_.comm(), stream));
    auto* y_i = y + i * (N / 2);
    HW_CHECK(cudaMemcpy2DAsync(y_i, N * sizeof(hw::bf16), matmul_w, N / 2 * sizeof(hw::bf16), N / 2 * sizeof(hw::bf16), M_dp,
                               cudaMemcpyDeviceToDevice, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_ar_two_axes
