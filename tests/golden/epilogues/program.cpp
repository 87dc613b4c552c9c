#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "kernels.h"

namespace programs::epilogues {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF, CUBLASLT_EPILOGUE_RELU_BIAS),
      plan_s_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(maximum_minimum_c));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M/4, K]");
  const int64_t M = in.x.dim(0) * 4;
  const int64_t K = in.x.dim(1);
  in.w.expect("w", CUDA_R_16BF, {K, hw::kAny}, rank_.device(), "bf16[K, N]");
  const int64_t N = in.w.dim(1);
  in.b.expect("b", CUDA_R_16BF, {N}, rank_.device(), "bf16[N]");
  in.r.expect("r", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  return {M, K, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_h_.prepare({M / 4, K}, {K, N}, {M / 4, N});
    plan_s_.prepare({M / 4, K}, {K, N}, {M / 4, N});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    memory.allocate(x_gathered_, M / 4 * K, loop_);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.h = {M, N}, .s = {M / 4, N}, .c = {M / 4, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N] = *prepared_;
  out.h.expect("h", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  out.s.expect("s", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  out.c.expect("c", CUDA_R_16BF, {M / 4, N}, rank_.device(), "bf16[M/4, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  const auto* b = in.b.as<hw::bf16>();
  const auto* r = in.r.as<hw::bf16>();
  auto* h = out.h.as<hw::bf16>();
  auto* s = out.s.as<hw::bf16>();
  auto* c = out.c.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:88  biased = (hw.matmul(x, w).stream("M", chunks=D) + b).stream("M", chunks=D)
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
    // fusions_beyond_examples.py:89  h = hw.relu(biased).stream("M", chunks=D).named("h")  # The loop has no kernel.
    auto* h_i = h + p * (M / 4 * N);
    const auto* x_chunk = i == 0 ? x : x_gathered;
    HW_CHECK(plan_h_.multiply(x_chunk, w, h_i, stream, {.bias = b}));
  }
  // fusions_beyond_examples.py:90  s = (hw.matmul(x, w) * 0.5 + r).named("s")
  HW_CHECK(plan_s_.multiply(x, w, s, {caller, workspace_}, {.scale = 0.5, .accumulate = r}));
  // fusions_beyond_examples.py:91  return h, s, hw.clip(s, -1, 1).named("c")
  HW_CHECK(hw::launch_pdl(maximum_minimum_c, hw::grid_of_elements<8>(M / 4 * N), caller, s, c, M / 4 * N));
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::epilogues
