#include "program.h"

#include "hostweave/check.h"
#include "kernels.h"

namespace programs::in_zigzag {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_cp_(rank.channel(kMesh, "cp", 2, hw::Transport::peer)),
      loop_(rank, "loop", 2),
      peer_copies_(rank, "peer_copies", 1),
      arrived_(2),
      plan_y_attention_blocks_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true, .streams = 2}),
      plan_y_attention_blocks_not_causal_(rank, CUDA_R_16BF, {.scale = 0.125, .has_lse = true, .streams = 2}),
      plan_y_attention_blocks_of_q_half_(rank, CUDA_R_16BF, {.scale = 0.125, .has_lse = true, .streams = 2}),
      arena_({&channel_cp_}) {
  HW_CHECK(hw::load(concat_y_attention_kv));
  HW_CHECK(hw::load(fill_y_attention_lse));
  HW_CHECK(hw::load(fused_y_attention_weights_y_attention_sums));
  HW_CHECK(hw::load(fused_y_attention));
}

Sizes Program::check(const Inputs& in) const {
  in.q.expect("q", CUDA_R_16BF, {4, hw::kAny, 64}, rank_.device(), "bf16[4, S/2, 64]");
  const int64_t S = in.q.dim(1) * 2;
  hw::expect_divisible("S", S, 4);
  in.k.expect("k", CUDA_R_16BF, {2, S / 2, 64}, rank_.device(), "bf16[2, S/2, 64]");
  in.v.expect("v", CUDA_R_16BF, {2, S / 2, 64}, rank_.device(), "bf16[2, S/2, 64]");
  return {S};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [S] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_attention_blocks_.prepare({4, S / 2, 64}, hw::Strided({2, S / 2, 64}, {64 * S, 128, 1}),
                                     hw::Strided({2, S / 2, 64}, {64 * S, 128, 1}), {4, S / 2, 64});
    plan_y_attention_blocks_not_causal_.prepare({4, S / 2, 64}, hw::Strided({2, S / 4, 64}, {64 * S, 128, 1}),
                                                hw::Strided({2, S / 4, 64}, {64 * S, 128, 1}), {4, S / 2, 64});
    plan_y_attention_blocks_of_q_half_.prepare(
        hw::Strided({4, S / 4, 64}, {32 * S, 64, 1}), hw::Strided({2, S / 2, 64}, {64 * S, 128, 1}),
        hw::Strided({2, S / 2, 64}, {64 * S, 128, 1}), hw::Strided({4, S / 4, 64}, {32 * S, 64, 1}));
    hw::MemoryPlan memory;
    // The live ranges of these buffers are disjoint, so they may share bytes:
    // - k_gathered_, y_attention_sums_
    memory.allocate_window(y_attention_kv_, 128 * S);
    memory.allocate(k_gathered_, 256 * S);
    memory.allocate(y_attention_blocks_, 256 * S);
    memory.allocate(y_attention_lse_, 4 * S);
    memory.allocate(y_attention_lse_half_packed_, S, loop_);
    memory.join(loop_);
    memory.free(y_attention_kv_);
    memory.free(k_gathered_);
    memory.allocate(y_attention_sums_, 2 * S);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {4, S / 2, 64}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [S] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {4, S / 2, 64}, rank_.device(), "bf16[4, S/2, 64]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [S] = *prepared_;
  const auto* q = in.q.as<hw::bf16>();
  const auto* k = in.k.as<hw::bf16>();
  const auto* v = in.v.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_cp = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // attention_cases.py:27  return hw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
  HW_CHECK(hw::launch_pdl(concat_y_attention_kv, hw::grid_of_elements<8>(128 * S), caller, k, v, y_attention_kv_, S));
  HW_CHECK(peer_copies_.fork(caller));
  {
    const hw::Stream stream = peer_copies_[0];
    HW_CHECK(channel_cp_.signal(1 - rank_cp, 0, stream));  // peer may read y_attention_kv_
  }
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t p = (rank_cp + i) % 2;
    auto* k_gathered_i = k_gathered_ + p * 128 * S;
    if (i != 0) {
      const hw::Stream stream = peer_copies_[0];
      HW_CHECK(channel_cp_.wait_signal(p, 0, stream));  // until the peer's y_attention_kv_ may be read
      HW_CHECK(cudaMemcpyAsync(k_gathered_i, arena_.on_peer(channel_cp_, p, y_attention_kv_), 128 * S * sizeof(hw::bf16),
                               cudaMemcpyDeviceToDevice, stream));
      HW_CHECK(cudaEventRecord(arrived_[i], stream));
    }
    const hw::Stream stream = loop_[i];
    if (i != 0) {
      HW_CHECK(cudaStreamWaitEvent(stream, arrived_[i], 0));
    }
    auto* y_attention_kv_chunk = i == 0 ? y_attention_kv_ : k_gathered_i;
    auto* y_attention_values_i = y_attention_kv_chunk + 64;
    auto* y_attention_blocks_i = y_attention_blocks_ + p * 128 * S;
    auto* y_attention_lse_i = y_attention_lse_ + p * 2 * S;
    if (i == 0) {
      HW_CHECK(plan_y_attention_blocks_.attend(q, y_attention_kv_chunk, y_attention_values_i, y_attention_blocks_i, stream,
                                               {.lse = y_attention_lse_i}));
    } else if (p < rank_cp) {
      HW_CHECK(plan_y_attention_blocks_not_causal_.attend(q, y_attention_kv_chunk, y_attention_values_i, y_attention_blocks_i,
                                                          stream, {.lse = y_attention_lse_i}));
    } else {
      HW_CHECK(cudaMemsetAsync(y_attention_blocks_i, 0, 128 * S * sizeof(hw::bf16), stream));
      HW_CHECK(hw::launch_pdl(fill_y_attention_lse, hw::grid_of_elements<4>(2 * S), stream, y_attention_lse_i, 2 * S));
      const auto* q_half = q + 16 * S;
      auto* y_attention_blocks_half = y_attention_blocks_i + 16 * S;
      auto* y_attention_lse_half_packed = y_attention_lse_half_packed_[i];
      HW_CHECK(plan_y_attention_blocks_of_q_half_.attend(q_half, y_attention_kv_chunk, y_attention_values_i,
                                                         y_attention_blocks_half, stream, {.lse = y_attention_lse_half_packed}));
      auto* y_attention_lse_half = y_attention_lse_i + S / 4;
      HW_CHECK(cudaMemcpy2DAsync(y_attention_lse_half, S / 2 * sizeof(float), y_attention_lse_half_packed, S / 4 * sizeof(float),
                                 S / 4 * sizeof(float), 4, cudaMemcpyDeviceToDevice, stream));
    }
  }
  {
    const hw::Stream stream = peer_copies_[0];
    HW_CHECK(channel_cp_.signal(1 - rank_cp, 0, stream));       // has read the peer's y_attention_kv_
    HW_CHECK(channel_cp_.wait_signal(1 - rank_cp, 0, stream));  // until the peer has read y_attention_kv_
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(peer_copies_.join(caller));
  HW_CHECK(hw::launch_pdl(fused_y_attention_weights_y_attention_sums, hw::grid_of_elements<4>(2 * S), caller, y_attention_lse_,
                          y_attention_lse_, y_attention_sums_, S));
  HW_CHECK(hw::launch_pdl(fused_y_attention, hw::grid_of_elements<8>(128 * S), caller, y_attention_sums_, y_attention_lse_,
                          y_attention_blocks_, y, 2 * S));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::in_zigzag
