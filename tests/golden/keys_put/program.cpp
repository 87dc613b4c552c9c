#include "program.h"

#include "hostweave/check.h"
#include "kernels.h"

namespace programs::keys_in_a_loop {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4, hw::Transport::peer)),
      loop_(rank, "loop", 2),
      peer_copies_(rank, "peer_copies", 1),
      arrived_(4),
      plan_y_blocks_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true, .streams = 2}),
      plan_y_blocks_not_causal_(rank, CUDA_R_16BF, {.scale = 0.125, .has_lse = true, .streams = 2}),
      arena_({&channel_x_}) {
  HW_CHECK(hw::load(concat_y_kv));
  HW_CHECK(hw::load(fill_y_lse));
  HW_CHECK(hw::load(fused_y_weights_y_sums));
  HW_CHECK(hw::load(fused_y));
}

Sizes Program::check(const Inputs& in) const {
  in.q.expect("q", CUDA_R_16BF, {2, hw::kAny, 64}, rank_.device(), "bf16[2, S/4, 64]");
  const int64_t S = in.q.dim(1) * 4;
  in.k.expect("k", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  in.v.expect("v", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  return {S};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [S] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_blocks_.prepare({2, S / 4, 64}, hw::Strided({2, S / 4, 64}, {32 * S, 128, 1}),
                           hw::Strided({2, S / 4, 64}, {32 * S, 128, 1}), {2, S / 4, 64});
    plan_y_blocks_not_causal_.prepare({2, S / 4, 64}, hw::Strided({2, S / 4, 64}, {32 * S, 128, 1}),
                                      hw::Strided({2, S / 4, 64}, {32 * S, 128, 1}), {2, S / 4, 64});
    hw::MemoryPlan memory;
    // The live ranges of these buffers are disjoint, so they may share bytes:
    // - keys_, y_sums_
    memory.allocate_window(y_kv_, 64 * S);
    memory.allocate(keys_, 256 * S);
    memory.allocate(y_blocks_, 128 * S);
    memory.allocate(y_lse_, 2 * S);
    memory.free(y_kv_);
    memory.free(keys_);
    memory.allocate(y_sums_, S / 2);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {2, S / 4, 64}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [S] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [S] = *prepared_;
  const auto* q = in.q.as<hw::bf16>();
  const auto* k = in.k.as<hw::bf16>();
  const auto* v = in.v.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // attention_cases.py:52  return hw.scaled_dot_product_attention(q, keys, values, is_causal=True)
  HW_CHECK(hw::launch_pdl(concat_y_kv, hw::grid_of_elements<8>(64 * S), caller, k, v, y_kv_, S));
  HW_CHECK(peer_copies_.fork(caller));
  {
    const hw::Stream stream = peer_copies_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.signal((rank_x + 1 + i) % 4, 0, stream));  // peer may read y_kv_
    }
  }
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    auto* keys_i = keys_ + p * 64 * S;
    if (i != 0) {
      const hw::Stream stream = peer_copies_[0];
      HW_CHECK(channel_x_.wait_signal(p, 0, stream));  // until the peer's y_kv_ may be read
      if (p < rank_x) {
        HW_CHECK(cudaMemcpyAsync(keys_i, arena_.on_peer(channel_x_, p, y_kv_), 64 * S * sizeof(hw::bf16),
                                 cudaMemcpyDeviceToDevice, stream));
      }
      HW_CHECK(cudaEventRecord(arrived_[i], stream));
    }
    const hw::Stream stream = loop_[i];
    if (i != 0) {
      HW_CHECK(cudaStreamWaitEvent(stream, arrived_[i], 0));
    }
    auto* y_kv_chunk = i == 0 ? y_kv_ : keys_i;
    auto* y_values_i = y_kv_chunk + 64;
    auto* y_blocks_i = y_blocks_ + p * 32 * S;
    auto* y_lse_i = y_lse_ + p * (S / 2);
    if (i == 0) {
      HW_CHECK(plan_y_blocks_.attend(q, y_kv_chunk, y_values_i, y_blocks_i, stream, {.lse = y_lse_i}));
    } else if (p < rank_x) {
      HW_CHECK(plan_y_blocks_not_causal_.attend(q, y_kv_chunk, y_values_i, y_blocks_i, stream, {.lse = y_lse_i}));
    } else {
      HW_CHECK(cudaMemsetAsync(y_blocks_i, 0, 32 * S * sizeof(hw::bf16), stream));
      HW_CHECK(hw::launch_pdl(fill_y_lse, hw::grid_of_elements<4>(S / 2), stream, y_lse_i, S / 2));
    }
  }
  {
    const hw::Stream stream = peer_copies_[0];
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.signal((rank_x + 1 + i) % 4, 0, stream));  // has read the peer's y_kv_
    }
    for (int64_t i = 0; i < 3; ++i) {
      HW_CHECK(channel_x_.wait_signal((rank_x + 1 + i) % 4, 0, stream));  // until the peer has read y_kv_
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(peer_copies_.join(caller));
  HW_CHECK(hw::launch_pdl(fused_y_weights_y_sums, hw::grid_of_elements<4>(S / 2), caller, y_lse_, y_lse_, y_sums_, S));
  HW_CHECK(hw::launch_pdl(fused_y, hw::grid_of_elements<8>(32 * S), caller, y_sums_, y_lse_, y_blocks_, y, S));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::keys_in_a_loop
