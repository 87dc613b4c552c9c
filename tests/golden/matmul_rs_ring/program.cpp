#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/index.h"

namespace programs::matmul_rs_ring {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      arrived_(3),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 4);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_x = hw::local_size(K, 4, rank_.index());
  in.x.expect("x", CUDA_R_16BF, {M, K_x}, rank_.device(), "bf16[M, local(K, x)]");
  in.w.expect("w", CUDA_R_16BF, {K_x, hw::kAny}, rank_.device(), "bf16[local(K, x), N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N, K_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, K_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_.prepare({M / 4, K_x}, {K_x, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate(matmul_w_, M * N);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M / 4, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, K_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, K_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // seeds.py:95  return hw.reshard(hw.matmul(x, w), "M@x", "N").stream("M", chunks=D, algorithm="ring")
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x - i + 3) % 4;
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + q * (M / 4 * K_x);
    auto* matmul_w_i = matmul_w_ + q * (M / 4 * N);
    if (i == 0) {
      HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w_i, stream));
    } else {
      HW_CHECK(cudaStreamWaitEvent(stream, arrived_[i - 1], 0));
      if (i < 3) {
        HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w_i, stream, {.accumulate = matmul_w_i}));
      } else {
        HW_CHECK(plan_matmul_w_.multiply(x_i, w, y, stream, {.accumulate = matmul_w_i}));
      }
    }
    if (i < 3) {
      auto* matmul_w_next = matmul_w_ + ((q + 3) % 4) * (M / 4 * N);
      {
        HW_CHECK(ncclGroupStart());
        const hw::CloseGroupOnError guard;
        HW_CHECK(ncclRecv(matmul_w_next, M / 4 * N, ncclBfloat16, (rank_x + 3) % 4, channel_x_.comm(), stream));
        HW_CHECK(ncclSend(matmul_w_i, M / 4 * N, ncclBfloat16, (rank_x + 1) % 4, channel_x_.comm(), stream));
        HW_CHECK(ncclGroupEnd());
      }
      HW_CHECK(cudaEventRecord(arrived_[i], stream));
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_rs_ring
