#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "kernels.h"

namespace programs::trained_in_zigzag {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_cp_(rank.channel(kMesh, "cp", 4)),
      plan_y_first_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true}),
      plan_y_second_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true}),
      plan_dq_first_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true}),
      plan_dq_second_(rank, CUDA_R_16BF, {.scale = 0.125, .causal = true, .has_lse = true}) {
  HW_CHECK(hw::load(reverse_second_in_order_pieces));
  HW_CHECK(hw::load(add_concat_local));
  HW_CHECK(hw::load(reverse_second_pieces));
}

Sizes Program::check(const Inputs& in) const {
  in.q.expect("q", CUDA_R_16BF, {4, hw::kAny, 64}, rank_.device(), "bf16[4, S/4, 64]");
  const int64_t S = in.q.dim(1) * 4;
  hw::expect_divisible("S", S, 8);
  in.k.expect("k", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  in.v.expect("v", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  in.dy.expect("dy", CUDA_R_16BF, {4, S / 4, 64}, rank_.device(), "bf16[4, S/4, 64]");
  return {S};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [S] = sizes;
  if (prepared_ != sizes) {
    const int64_t rank_cp = rank_.index();
    prepared_.reset();  // stays empty if an error follows
    plan_y_first_.prepare(hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), hw::Strided({2, S / 2, 64}, {64 * S, 64, 1}),
                          hw::Strided({2, S / 2, 64}, {64 * S, 64, 1}), hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}),
                          rank_cp * (S / 8));
    plan_y_second_.prepare(hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), {2, S, 64}, {2, S, 64},
                           hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), (3 - rank_cp) * (S / 8) + S / 2);
    plan_dq_first_.prepare(hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), hw::Strided({2, S / 2, 64}, {64 * S, 64, 1}),
                           hw::Strided({2, S / 2, 64}, {64 * S, 64, 1}), hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}),
                           hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}),
                           {2, S / 2, 64}, {2, S / 2, 64}, rank_cp * (S / 8));
    plan_dq_second_.prepare(hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), {2, S, 64}, {2, S, 64},
                            hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}),
                            hw::Strided({4, S / 8, 64}, {16 * S, 64, 1}), {2, S, 64}, {2, S, 64},
                            (3 - rank_cp) * (S / 8) + S / 2);
    hw::MemoryPlan memory;
    // The live ranges of these buffers are disjoint, so they may share bytes:
    // - k_in_order_gathered_, v_in_order_pieces_, dk_local_, dv_pieces_
    // - v_in_order_gathered_, lse_first_, dk_local_second_, dv_local_
    // - k_in_order_pieces_, dk_pieces_
    memory.allocate(k_in_order_gathered_, 128 * S);
    memory.allocate(v_in_order_gathered_, 128 * S);
    memory.allocate(k_in_order_pieces_, 128 * S);
    memory.free(k_in_order_gathered_);
    memory.allocate(v_in_order_pieces_, 128 * S);
    memory.free(v_in_order_gathered_);
    memory.allocate(lse_first_, S / 2);
    memory.allocate(lse_second_, S / 2);
    memory.allocate(dk_local_first_, 64 * S);
    memory.allocate(dv_local_first_, 64 * S);
    memory.free(lse_first_);
    memory.allocate(dk_local_second_, 128 * S);
    memory.allocate(dv_local_second_, 128 * S);
    memory.free(k_in_order_pieces_);
    memory.free(v_in_order_pieces_);
    memory.free(lse_second_);
    memory.allocate(dk_local_, 128 * S);
    memory.free(dk_local_first_);
    memory.free(dk_local_second_);
    memory.allocate(dv_local_, 128 * S);
    memory.free(dv_local_first_);
    memory.free(dv_local_second_);
    memory.allocate(dk_pieces_, 128 * S);
    memory.free(dk_local_);
    memory.allocate(dv_pieces_, 128 * S);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {4, S / 4, 64}, .dq = {4, S / 4, 64}, .dk = {2, S / 4, 64}, .dv = {2, S / 4, 64}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [S] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {4, S / 4, 64}, rank_.device(), "bf16[4, S/4, 64]");
  out.dq.expect("dq", CUDA_R_16BF, {4, S / 4, 64}, rank_.device(), "bf16[4, S/4, 64]");
  out.dk.expect("dk", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  out.dv.expect("dv", CUDA_R_16BF, {2, S / 4, 64}, rank_.device(), "bf16[2, S/4, 64]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [S] = *prepared_;
  const auto* q = in.q.as<hw::bf16>();
  const auto* k = in.k.as<hw::bf16>();
  const auto* v = in.v.as<hw::bf16>();
  const auto* dy = in.dy.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  auto* dq = out.dq.as<hw::bf16>();
  auto* dk = out.dk.as<hw::bf16>();
  auto* dv = out.dv.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // attention_cases.py:38  y, lse = hw.attention(q, k, v, "top_left", enable_gqa=True)
  {
    HW_CHECK(ncclGroupStart());
    const hw::CloseGroupOnError guard;
    HW_CHECK(ncclAllGather(k, k_in_order_gathered_, 32 * S, ncclBfloat16, channel_cp_.comm(), caller));
    HW_CHECK(ncclAllGather(v, v_in_order_gathered_, 32 * S, ncclBfloat16, channel_cp_.comm(), caller));
    HW_CHECK(ncclGroupEnd());
  }
  HW_CHECK(hw::launch_pdl(reverse_second_in_order_pieces, hw::grid_of_elements<8>(128 * S), caller, k_in_order_gathered_,
                          k_in_order_pieces_, S));
  HW_CHECK(hw::launch_pdl(reverse_second_in_order_pieces, hw::grid_of_elements<8>(128 * S), caller, v_in_order_gathered_,
                          v_in_order_pieces_, S));
  HW_CHECK(plan_y_first_.attend(q, k_in_order_pieces_, v_in_order_pieces_, y, caller, {.lse = lse_first_}));
  const auto* q_second_piece = q + 8 * S;
  auto* y_second_piece = y + 8 * S;
  HW_CHECK(plan_y_second_.attend(q_second_piece, k_in_order_pieces_, v_in_order_pieces_, y_second_piece, caller,
                                 {.lse = lse_second_}));
  // attention_cases.py:39  dq, dk, dv = hw.attention_backward(q, k, v, y, dy, lse, "top_left", enable_gqa=True)
  HW_CHECK(plan_dq_first_.differentiate(q, k_in_order_pieces_, v_in_order_pieces_, y, lse_first_, dy, dq, dk_local_first_,
                                        dv_local_first_, caller));
  const auto* dy_second_piece = dy + 8 * S;
  auto* dq_second_piece = dq + 8 * S;
  HW_CHECK(plan_dq_second_.differentiate(q_second_piece, k_in_order_pieces_, v_in_order_pieces_, y_second_piece, lse_second_,
                                         dy_second_piece, dq_second_piece, dk_local_second_, dv_local_second_, caller));
  auto* dk_local_second_upper_half = dk_local_second_ + 32 * S;
  HW_CHECK(hw::launch_pdl(add_concat_local, hw::grid_of_elements<8>(128 * S), caller, dk_local_second_, dk_local_first_,
                          dk_local_second_upper_half, dk_local_, S));
  auto* dv_local_second_upper_half = dv_local_second_ + 32 * S;
  HW_CHECK(hw::launch_pdl(add_concat_local, hw::grid_of_elements<8>(128 * S), caller, dv_local_second_, dv_local_first_,
                          dv_local_second_upper_half, dv_local_, S));
  // attention_cases.py:40  return y, dq, *(hw.reshard(x, 2, "S@zigzag(cp)", 64) for x in (dk, dv))
  HW_CHECK(hw::launch_pdl(reverse_second_pieces, hw::grid_of_elements<8>(128 * S), caller, dk_local_, dk_pieces_, S));
  HW_CHECK(hw::launch_pdl(reverse_second_pieces, hw::grid_of_elements<8>(128 * S), caller, dv_local_, dv_pieces_, S));
  {
    HW_CHECK(ncclGroupStart());
    const hw::CloseGroupOnError guard;
    HW_CHECK(ncclReduceScatter(dk_pieces_, dk, 32 * S, ncclBfloat16, ncclSum, channel_cp_.comm(), caller));
    HW_CHECK(ncclReduceScatter(dv_pieces_, dv, 32 * S, ncclBfloat16, ncclSum, channel_cp_.comm(), caller));
    HW_CHECK(ncclGroupEnd());
  }
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::trained_in_zigzag
