#include "hostweave/fibers.h"
#include "kernels.h"

namespace programs::vocabulary {

// %iota_V: i64[V] = iota()
// %index_ids: i64[T] = index(%ids, %iota_V)
// %index_ids_expanded: i64[T, 1] = reshape(%index_ids)
// %iota_V_sliced: i64[local(V, tp)] = iota(offset=first(V, tp))
// %table_taken_partial: bf16[T, D] = take(%table, %index_ids_expanded, %iota_V_sliced, axis=0)
__global__ void fused_table_taken_partial(const int32_t* ids, const hw::bf16* table, hw::bf16* table_taken_partial, int64_t V,
                                          int64_t D, int64_t T, int64_t V_tp, int64_t V_first_tp) {
  HW_TOUCHES(hw::reads(ids, T), hw::reads(table, D * V_tp), hw::writes(table_taken_partial, D * T));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(D * T)) {
      const int64_t i = element / Index(D);
      const int64_t j = element % Index(D);
      const int64_t index_ids = hw::index(ids[i], V);
      const int64_t table_taken_partial_row = index_ids - V_first_tp;
      const bool table_taken_partial_held = table_taken_partial_row >= 0 && table_taken_partial_row < V_tp;
      const auto table_taken_partial_elements =
          table_taken_partial_held ? hw::load<kWidth>(table + table_taken_partial_row * D + j) : hw::Values<hw::bf16, kWidth>{};
      hw::store(table_taken_partial + element, table_taken_partial_elements);
    }
  };
  if (D % 8 != 0 || !hw::aligned(table, table_taken_partial)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(D * T)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %iota_T_sliced: i32[local(T, tp)] = iota(offset=first(T, tp))
// %iota_T_expanded: i32[local(T, tp), 1] = reshape(%iota_T_sliced)
// %iota_S: i32[S] = iota()
// %iota_S_expanded: i32[1, S] = reshape(%iota_S)
// %is_past: bool[local(T, tp), S] = greater_equal(%iota_T_expanded, %iota_S_expanded)
// %where_is_past: f32[local(T, tp), S] = where(%is_past, %scores, -inf)
__global__ void fused_where_is_past(const float* scores, float* where_is_past, int64_t S, int64_t T_tp, int64_t T_first_tp) {
  HW_TOUCHES(hw::reads(scores, S * T_tp), hw::writes(where_is_past, S * T_tp));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(S * T_tp)) {
      const int64_t i = element / Index(S);
      const int64_t j = element % Index(S);
      const int32_t iota_T_expanded = int32_t(T_first_tp + i);
      const auto scores_element = hw::load<kWidth>(scores + element);
      hw::Values<float, kWidth> where_is_past_element;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const bool is_past = iota_T_expanded >= int32_t(j + e);
        where_is_past_element[e] = is_past ? scores_element[e] : -INFINITY;
      }
      hw::store(where_is_past + element, where_is_past_element);
    }
  };
  if (S % 4 != 0 || !hw::aligned(scores, where_is_past)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(S * T_tp)) {
    compute(hw::Width<4>(), uint32_t());
  } else {
    compute(hw::Width<4>(), int64_t());
  }
}

}  // namespace programs::vocabulary
