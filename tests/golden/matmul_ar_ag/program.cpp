#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"

namespace programs::matmul_ar_ag {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_tp_(rank.channel(kMesh, "tp", 4)),
      channel_dp_(rank.channel(kMesh, "dp", 2)),
      loop_(rank, "loop", 3),
      channels_idle_(1),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.dim(0) * 2;
  hw::expect_divisible("M", M, 6);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_tp = hw::local_size(K, 4, rank_.index() % 4);
  in.x.expect("x", CUDA_R_16BF, {M / 2, K_tp}, rank_.device(), "bf16[M/2, local(K, tp)]");
  in.w.expect("w", CUDA_R_16BF, {K_tp, hw::kAny}, rank_.device(), "bf16[local(K, tp), N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N, K_tp};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, K_tp] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_.prepare({M / 6, K_tp}, {K_tp, N}, {M / 6, N});
    hw::MemoryPlan memory;
    memory.allocate(matmul_w_, M / 6 * N, loop_);
    memory.allocate(y_packed_, M / 3 * N, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, K_tp] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, K_tp] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:38  return hw.reshard(hw.matmul(x, w), "M", "N").stream("M", chunks=3)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * (M / 6 * K_tp);
    auto* matmul_w = matmul_w_[i];
    HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w, stream));
    if (i != 0) {
      HW_CHECK(cudaStreamWaitEvent(stream, channels_idle_[0], 0));
    }
    HW_CHECK(ncclAllReduce(matmul_w, matmul_w, M / 6 * N, ncclBfloat16, ncclSum, channel_tp_.comm(), stream));
    auto* y_packed = y_packed_[i];
    HW_CHECK(ncclAllGather(matmul_w, y_packed, M / 6 * N, ncclBfloat16, channel_dp_.comm(), stream));
    HW_CHECK(cudaEventRecord(channels_idle_[0], stream));
    auto* y_i = y + i * (M / 6 * N);
    HW_CHECK(cudaMemcpy2DAsync(y_i, M / 2 * N * sizeof(hw::bf16), y_packed, M / 6 * N * sizeof(hw::bf16),
                               M / 6 * N * sizeof(hw::bf16), 2, cudaMemcpyDeviceToDevice, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_ar_ag
