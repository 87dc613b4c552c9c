#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::in_zigzag {

// %y_attention_kv: bf16[2, S/2, 128] = concat(%y_keys, %y_values, axis=2)
__global__ void concat_y_attention_kv(const hw::bf16* y_keys, const hw::bf16* y_values, hw::bf16* y_attention_kv, int64_t S) {
  HW_TOUCHES(hw::reads(y_keys, 64 * S), hw::reads(y_values, 64 * S), hw::writes(y_attention_kv, 128 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(128 * S)) {
      const int64_t i = element / 128;
      const int64_t j = element % 128;
      hw::Values<hw::bf16, kWidth> y_attention_kv_element;
      if (j < 64) {
        const auto y_keys_ij = hw::load<kWidth>(y_keys + i * 64 + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          y_attention_kv_element[e] = y_keys_ij[e];
        }
      } else {
        const auto y_values_ij = hw::load<kWidth>(y_values + i * 64 + (j - 64));
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          y_attention_kv_element[e] = y_values_ij[e];
        }
      }
      hw::store(y_attention_kv + element, y_attention_kv_element);
    }
  };
  if (!hw::aligned(y_keys, y_values, y_attention_kv)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(128 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %y_attention_lse: f32[4, S/2] = fill(value=-inf)
__global__ void fill_y_attention_lse(float* y_attention_lse, int64_t elements) {
  HW_TOUCHES(hw::writes(y_attention_lse, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      hw::Values<float, kWidth> y_attention_lse_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_attention_lse_i[e] = -INFINITY;
      }
      hw::store(y_attention_lse + i, y_attention_lse_i);
    }
  };
  if (elements % 4 == 0 && hw::aligned(y_attention_lse)) {
    compute(hw::Width<4>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y_attention_max: f32[1, 4, S/2] = max(%y_attention_lse, axis=(0,), keepdims=true)
// %y_attention_shift: f32[1, 4, S/2] = maximum(%y_attention_max, -1e+30)
// %y_attention_subtract: f32[2, 4, S/2] = subtract(%y_attention_lse, %y_attention_shift)
// %y_attention_weights: f32[2, 4, S/2] = exp(%y_attention_subtract)
// %y_attention_sums: f32[1, 4, S/2] = sum(%y_attention_weights, axis=(0,), keepdims=true)
__global__ void fused_y_attention_weights_y_attention_sums(const float* y_attention_lse, float* y_attention_weights,
                                                           float* y_attention_sums, int64_t S) {
  HW_TOUCHES(hw::reads(y_attention_lse, 4 * S), hw::writes(y_attention_weights, 4 * S), hw::writes(y_attention_sums, 2 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t j : hw::over_grid<kWidth>(2 * S)) {
      auto y_attention_max = hw::filled<kWidth, float>(-INFINITY);
      for (int64_t i = 0; i < 2; ++i) {
        const auto y_attention_lse_ij = hw::load<kWidth>(y_attention_lse + i * 2 * S + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_attention_lse_e = y_attention_lse_ij[e];
          y_attention_max[e] = hw::Maximum()(y_attention_max[e], y_attention_lse_e);
        }
      }
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t i = 0; i < 2; ++i) {
        const auto y_attention_lse_ij = hw::load<kWidth>(y_attention_lse + i * 2 * S + j);
        hw::Values<float, kWidth> y_attention_weights_ij;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_attention_lse_e = y_attention_lse_ij[e];
          const float y_attention_max_e = y_attention_max[e];
          const float y_attention_shift =
              (y_attention_max_e > -1e+30f || y_attention_max_e != y_attention_max_e) ? y_attention_max_e : -1e+30f;
          const float y_attention_subtract = y_attention_lse_e - y_attention_shift;
          const float y_attention_weights_e = expf(y_attention_subtract);
          sum[e] += y_attention_weights_e;
          y_attention_weights_ij[e] = y_attention_weights_e;
        }
        hw::store(y_attention_weights + i * 2 * S + j, y_attention_weights_ij);
      }
      hw::Values<float, kWidth> y_attention_sums_j;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_attention_sums_j[e] = sum[e];
      }
      hw::store(y_attention_sums + j, y_attention_sums_j);
    }
  };
  if (2 * S % 4 == 0 && hw::aligned(y_attention_lse, y_attention_weights, y_attention_sums)) {
    compute(hw::Width<4>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y_attention_maximum: f32[1, 4, S/2] = maximum(%y_attention_sums, 1.0)
// %y_attention_divide: f32[2, 4, S/2] = divide(%y_attention_weights, %y_attention_maximum)
// %y_attention_expand_dims: f32[2, 4, S/2, 1] = reshape(%y_attention_divide)
// %y_attention_greater: bool[2, 4, S/2, 1] = greater(%y_attention_expand_dims, 0.0)
// %y_attention_astype: f32[2, 4, S/2, 64] = astype(%y_attention_blocks)
// %y_attention_multiply: f32[2, 4, S/2, 64] = multiply(%y_attention_astype, %y_attention_expand_dims)
// %y_attention_where: f32[2, 4, S/2, 64] = where(%y_attention_greater, %y_attention_multiply, 0.0)
// %y_attention_sum: f32[4, S/2, 64] = sum(%y_attention_where, axis=(0,))
// %y_attention: bf16[4, S/2, 64] = astype(%y_attention_sum)
__global__ void fused_y_attention(const float* y_attention_sums, const float* y_attention_weights,
                                  const hw::bf16* y_attention_blocks, hw::bf16* y_attention, int64_t rows) {
  HW_TOUCHES(hw::reads(y_attention_sums, rows), hw::reads(y_attention_weights, 2 * rows),
             hw::reads(y_attention_blocks, 128 * rows), hw::writes(y_attention, 64 * rows));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(64 * rows)) {
      const int64_t i = element / 64;
      const float y_attention_sums_i = y_attention_sums[i];
      const float y_attention_maximum =
          (y_attention_sums_i > 1.0f || y_attention_sums_i != y_attention_sums_i) ? y_attention_sums_i : 1.0f;
      auto y_attention_sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t j = 0; j < 2; ++j) {
        const float y_attention_divide = y_attention_weights[j * rows + i] / y_attention_maximum;
        const bool y_attention_greater = y_attention_divide > 0.0f;
        const auto y_attention_blocks_elementj = hw::load<kWidth>(y_attention_blocks + j * 64 * rows + element);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_attention_multiply = y_attention_blocks_elementj.f32(e) * y_attention_divide;
          const float y_attention_where = y_attention_greater ? y_attention_multiply : 0.0f;
          y_attention_sum[e] += y_attention_where;
        }
      }
      hw::Values<hw::bf16, kWidth> y_attention_element;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_attention_element[e] = hw::bf16(y_attention_sum[e]);
      }
      hw::store(y_attention + element, y_attention_element);
    }
  };
  if (!hw::aligned(y_attention_blocks, y_attention)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(64 * rows)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

}  // namespace programs::in_zigzag
