#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "hostweave/types.h"
#include "kernels.h"

namespace programs::vocabulary {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), channel_tp_(rank.channel(kMesh, "tp", 4)), comm_(rank, "comm", 1) {
  HW_CHECK(hw::load(fused_table_taken_partial));
  HW_CHECK(hw::load(fused_where_is_past));
}

Sizes Program::check(const Inputs& in) const {
  const int64_t V = in.table.global_dim(0, 4);
  const int64_t V_tp = hw::local_size(V, 4, rank_.index());
  const int64_t V_first_tp = hw::local_begin(V, 4, rank_.index());
  const int64_t D = in.table.dim(1);
  in.table.expect("table", CUDA_R_16BF, {V_tp, D}, rank_.device(), "bf16[local(V, tp), D]");
  in.ids.expect("ids", CUDA_R_32I, {hw::kAny}, rank_.device(), "i32[T]");
  const int64_t T = in.ids.dim(0);
  const int64_t T_tp = hw::local_size(T, 4, rank_.index());
  const int64_t T_first_tp = hw::local_begin(T, 4, rank_.index());
  in.scores.expect("scores", CUDA_R_32F, {T_tp, hw::kAny}, rank_.device(), "f32[local(T, tp), S]");
  const int64_t S = in.scores.dim(1);
  return {V, D, T, S, V_tp, T_tp, V_first_tp, T_first_tp};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [V, D, T, S, V_tp, T_tp, V_first_tp, T_first_tp] = *prepared_;
  return {.table_taken = {T, D}, .where_is_past = {T_tp, S}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [V, D, T, S, V_tp, T_tp, V_first_tp, T_first_tp] = *prepared_;
  out.table_taken.expect("table_taken", CUDA_R_16BF, {T, D}, rank_.device(), "bf16[T, D]");
  out.where_is_past.expect("where_is_past", CUDA_R_32F, {T_tp, S}, rank_.device(), "f32[local(T, tp), S]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [V, D, T, S, V_tp, T_tp, V_first_tp, T_first_tp] = *prepared_;
  const auto* table = in.table.as<hw::bf16>();
  const auto* ids = in.ids.as<int32_t>();
  const auto* scores = in.scores.as<float>();
  auto* table_taken = out.table_taken.as<hw::bf16>();
  auto* where_is_past = out.where_is_past.as<float>();

  HW_CHECK(arena_.begin_call(caller));
  // test_golden.py:49  return hw.embedding(ids, table), hw.where(is_past, scores, float("-inf"))
  HW_CHECK(hw::launch_pdl(fused_table_taken_partial, hw::grid_of_elements<8>(D * T), caller, ids, table, table_taken, V, D, T,
                          V_tp, V_first_tp));
  HW_CHECK(comm_.fork(caller));
  {
    const hw::Stream stream = comm_[0];
    HW_CHECK(ncclAllReduce(table_taken, table_taken, D * T, ncclBfloat16, ncclSum, channel_tp_.comm(), stream));
  }
  // test_golden.py:48  is_past = hw.iota(scores, 0)[:, None] >= hw.iota(scores, 1)[None, :]
  // test_golden.py:49  return hw.embedding(ids, table), hw.where(is_past, scores, float("-inf"))
  HW_CHECK(
      hw::launch_pdl(fused_where_is_past, hw::grid_of_elements<4>(S * T_tp), caller, scores, where_is_past, S, T_tp, T_first_tp));
  HW_CHECK(comm_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::vocabulary
