#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::three_layers {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 4),
      plan_matmul_w_in_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_matmul_w_out_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(maximum_minimum_h));
  HW_CHECK(hw::load(fused_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M, E]");
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 4);
  const int64_t E = in.x.dim(1);
  const int64_t F = in.layers[0].w_in.global_dim(1, 4);
  const int64_t F_x = hw::local_size(F, 4, rank_.index());
  for (int64_t member = 0; member < 3; ++member) {
    const auto& each = in.layers[member];
    each.w_in.expect({"w_in_", member}, CUDA_R_16BF, {E, F_x}, rank_.device(), "bf16[E, local(F, x)]");
    each.w_out.expect({"w_out_", member}, CUDA_R_16BF, {F_x, E}, rank_.device(), "bf16[local(F, x), E]");
  }
  return {M, E, F, F_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, E, F, F_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_matmul_w_in_.prepare({M / 4, E}, {E, F_x}, {M / 4, F_x});
    plan_matmul_w_out_.prepare({M / 4, F_x}, {F_x, E}, {M / 4, E});
    hw::MemoryPlan memory;
    memory.allocate(y_other_, M / 4 * E);
    layer_memory(sizes, memory);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M / 4, E}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, E, F, F_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M / 4, E}, rank_.device(), "bf16[M/4, E]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, E, F, F_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:60  x = layer(x, **{name: weights[f"{name}_{i}"] for name in WEIGHTS})
  const auto* x_sliced = x + rank_x * (M / 4 * E);
  for (int64_t i = 0; i < 3; ++i) {
    auto* y_before = i % 2 == 0 ? y_other_ : y;
    auto* y_i = i % 2 == 0 ? y : y_other_;
    const auto* x_i = i == 0 ? x_sliced : y_before;
    layer(x_i, in.layers[i], y_i, caller);
  }
  HW_CHECK(arena_.end_call(caller));
}

void Program::layer(const hw::bf16* x, const LayerInputs& in, hw::bf16* y, cudaStream_t caller) {
  const hw::Range range("layer");
  const auto [M, E, F, F_x] = *prepared_;
  const int64_t rank_x = rank_.index();
  const auto* w_in = in.w_in.as<hw::bf16>();
  const auto* w_out = in.w_out.as<hw::bf16>();

  // fusions_beyond_examples.py:52  h = hw.clip(hw.matmul(x, w_in).stream("M", chunks=D), -1, 1).named("h")
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* x_gathered = layer_x_gathered_[i];
    if (i != 0) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(x_gathered, M / 4 * E, ncclBfloat16, p, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(x, M / 4 * E, ncclBfloat16, (rank_x - i + 4) % 4, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
    auto* matmul_w_in_i = layer_matmul_w_in_ + p * (M / 4 * F_x);
    const auto* x_chunk = i == 0 ? x : x_gathered;
    HW_CHECK(plan_matmul_w_in_.multiply(x_chunk, w_in, matmul_w_in_i, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(hw::launch_pdl(maximum_minimum_h, hw::grid_of_elements<8>(M * F_x), caller, layer_matmul_w_in_, layer_matmul_w_in_,
                          M * F_x));
  // fusions_beyond_examples.py:53  scattered = hw.reshard(hw.matmul(h, w_out), "M@x", "E").stream("M", chunks=D) ...
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t q = (rank_x + 1 + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* h_i = layer_matmul_w_in_ + q * (M / 4 * F_x);
    auto* matmul_w_out = layer_matmul_w_out_[i];
    const int64_t sender = (rank_x - i + 3) % 4;
    auto* scattered_landing_i = layer_scattered_landing_ + sender * (M / 4 * E);
    auto* matmul_w_out_chunk = i >= 3 ? scattered_landing_i : matmul_w_out;
    HW_CHECK(plan_matmul_w_out_.multiply(h_i, w_out, matmul_w_out_chunk, stream));
    if (i < 3) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(scattered_landing_i, M / 4 * E, ncclBfloat16, sender, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(matmul_w_out, M / 4 * E, ncclBfloat16, q, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(loop_.join(caller));
  // fusions_beyond_examples.py:54  return hw.clip(x + scattered, -1, 1)
  HW_CHECK(hw::launch_pdl(fused_y, hw::grid_of_elements<8>(M / 4 * E), caller, layer_scattered_landing_, x, y, M, E));
}

void Program::layer_memory(const Sizes& sizes, hw::MemoryPlan& memory) {
  const auto [M, E, F, F_x] = sizes;
  // The live ranges of these buffers are disjoint, so they may share bytes:
  // - layer_x_gathered_, layer_scattered_landing_
  memory.allocate(layer_matmul_w_in_, M * F_x);
  memory.allocate(layer_x_gathered_, M / 4 * E, loop_);
  memory.join(loop_);
  memory.allocate(layer_scattered_landing_, M * E);
  memory.allocate(layer_matmul_w_out_, M / 4 * E, loop_);
  memory.join(loop_);
  memory.free(layer_matmul_w_in_);
  memory.free(layer_scattered_landing_);
}

}  // namespace programs::three_layers
