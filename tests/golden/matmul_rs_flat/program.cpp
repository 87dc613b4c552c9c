#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::matmul_rs_flat {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_matmul_w_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(sum_y));
}

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
    memory.allocate(y_landing_, M * N);
    memory.allocate(matmul_w_, M / 4 * N, loop_);
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
  // seeds.py:82  return hw.reshard(hw.matmul(x, w), "M@x", "N").stream("M", chunks=D)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + q * (M / 4 * K_x);
    auto* matmul_w = matmul_w_[i];
    const int64_t sender = (rank_x - i + 3) % 4;
    auto* y_landing_i = y_landing_ + sender * (M / 4 * N);
    auto* matmul_w_chunk = i >= 3 ? y_landing_i : matmul_w;
    HW_CHECK(plan_matmul_w_.multiply(x_i, w, matmul_w_chunk, stream));
    if (i < 3) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(y_landing_i, M / 4 * N, ncclBfloat16, sender, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(matmul_w, M / 4 * N, ncclBfloat16, q, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(hw::launch_pdl(sum_y, hw::grid_of_elements<8>(M / 4 * N), caller, y_landing_, y, M, N));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_rs_flat
