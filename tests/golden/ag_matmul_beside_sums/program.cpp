#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "kernels.h"

namespace programs::ag_matmul_beside_sums {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(sum_s_partial));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  const int64_t K = in.x.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  in.v.expect("v", CUDA_R_16BF, {M / 4, hw::kAny}, rank_.device(), "bf16[M/4, L]");
  const int64_t L = in.v.dim(1);
  return {M, K, N, L};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, L] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare({M / 4, K}, {K, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate(x_gathered_, M / 4 * K, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, N}, .s = {K}, .t = {L}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, L] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  out.s.expect("s", CUDA_R_16BF, {K}, rank_.device(), "bf16[K]");
  out.t.expect("t", CUDA_R_16BF, {L}, rank_.device(), "bf16[L]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, L] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  const auto* v = in.v.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  auto* s = out.s.as<hw::bf16>();
  auto* t = out.t.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:43  y = hw.matmul(x, w).stream("M", chunks=D)
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
    auto* y_i = y + p * (M / 4 * N);
    const auto* x_chunk = i == 0 ? x : x_gathered;
    HW_CHECK(plan_y_.multiply(x_chunk, w, y_i, stream));
  }
  // fusions_beyond_examples.py:44  return y, hw.sum(x, axis=0).named("s"), hw.sum(v, axis=0).named("t")
  HW_CHECK(hw::launch_pdl(sum_s_partial, hw::grid_of_columns(K, 512), caller, x, s, M, K));
  HW_CHECK(hw::launch_pdl(sum_s_partial, hw::grid_of_columns(L, 512), caller, v, t, M, L));
  {
    HW_CHECK(ncclGroupStart());
    const hw::CloseGroupOnError guard;
    HW_CHECK(ncclAllReduce(s, s, K, ncclBfloat16, ncclSum, channel_x_.comm(), caller));
    HW_CHECK(ncclAllReduce(t, t, L, ncclBfloat16, ncclSum, channel_x_.comm(), caller));
    HW_CHECK(ncclGroupEnd());
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::ag_matmul_beside_sums
