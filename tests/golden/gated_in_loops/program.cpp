#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::gated_in_loops {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_g_and_u_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_matmul_down_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(maximum_minimum_multiply_h));
  HW_CHECK(hw::load(sum_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  const int64_t K = in.x.dim(1);
  const int64_t F = in.gate.global_dim(1, 4);
  const int64_t F_x = hw::local_size(F, 4, rank_.index());
  in.gate.expect("gate", CUDA_R_16BF, {K, F_x}, rank_.device(), "bf16[K, local(F, x)]");
  in.up.expect("up", CUDA_R_16BF, {K, F_x}, rank_.device(), "bf16[K, local(F, x)]");
  in.down.expect("down", CUDA_R_16BF, {F_x, K}, rank_.device(), "bf16[local(F, x), K]");
  return {M, K, F, F_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, F, F_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_g_and_u_.prepare({M / 4, K}, {K, F_x}, {M / 4, F_x});
    plan_matmul_down_.prepare({M / 4, F_x}, {F_x, K}, {M / 4, K});
    hw::MemoryPlan memory;
    // The live ranges of these buffers are disjoint, so they may share bytes:
    // - u_, y_landing_
    // - x_gathered_, matmul_down_
    memory.allocate(g_, M * F_x);
    memory.allocate(u_, M * F_x);
    memory.allocate(x_gathered_, M / 4 * K, loop_);
    memory.join(loop_);
    memory.free(u_);
    memory.allocate(y_landing_, M * K);
    memory.allocate(matmul_down_, M / 4 * K, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M / 4, K}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, F, F_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M / 4, K}, rank_.device(), "bf16[M/4, K]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, F, F_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* gate = in.gate.as<hw::bf16>();
  const auto* up = in.up.as<hw::bf16>();
  const auto* down = in.down.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:96  g = hw.matmul(x, gate).stream("M", chunks=D)
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
    auto* g_i = g_ + p * (M / 4 * F_x);
    const auto* x_chunk = i == 0 ? x : x_gathered;
    HW_CHECK(plan_g_and_u_.multiply(x_chunk, gate, g_i, stream));
    // fusions_beyond_examples.py:97  u = hw.matmul(x, up).stream("M", chunks=D)
    auto* u_i = u_ + p * (M / 4 * F_x);
    HW_CHECK(plan_g_and_u_.multiply(x_chunk, up, u_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  // fusions_beyond_examples.py:98  h = (hw.clip(g, -1, 1) * u).named("h")
  HW_CHECK(hw::launch_pdl(maximum_minimum_multiply_h, hw::grid_of_elements<8>(M * F_x), caller, g_, u_, g_, M * F_x));
  // fusions_beyond_examples.py:99  return hw.reshard(hw.matmul(h, down), "M@x", "K").stream("M", chunks=D)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* h_i = g_ + q * (M / 4 * F_x);
    auto* matmul_down = matmul_down_[i];
    const int64_t sender = (rank_x - i + 3) % 4;
    auto* y_landing_i = y_landing_ + sender * (M / 4 * K);
    auto* matmul_down_chunk = i >= 3 ? y_landing_i : matmul_down;
    HW_CHECK(plan_matmul_down_.multiply(h_i, down, matmul_down_chunk, stream));
    if (i < 3) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(y_landing_i, M / 4 * K, ncclBfloat16, sender, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(matmul_down, M / 4 * K, ncclBfloat16, q, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(hw::launch_pdl(sum_y, hw::grid_of_elements<8>(M / 4 * K), caller, y_landing_, y, M, K));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::gated_in_loops
