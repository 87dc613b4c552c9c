#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"

namespace programs::ag_matmul_flat_chunked {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  hw::expect_divisible("M", M, 8);
  const int64_t K = in.x.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare({M / 8, K}, {K, N}, {M / 8, N});
    hw::MemoryPlan memory;
    memory.allocate(x_gathered_, M / 8 * K, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:12  return hw.matmul(x, w).stream("M", chunks=2 * D)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t p = (rank_x + i / 2) % 4;
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + (i % 2) * (M / 8 * K);
    auto* x_gathered = x_gathered_[i % 4];
    if (i >= 2) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(x_gathered, M / 8 * K, ncclBfloat16, p, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(x_i, M / 8 * K, ncclBfloat16, (rank_x - i / 2 + 4) % 4, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
    auto* y_i = y + (p * 2 + i % 2) * (M / 8 * N);
    const auto* x_chunk = i < 2 ? x_i : x_gathered;
    HW_CHECK(plan_y_.multiply(x_chunk, w, y_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::ag_matmul_flat_chunked
