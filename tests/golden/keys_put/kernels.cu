#include "hostweave/kernel.h"
#include "kernels.h"

namespace programs::keys_in_a_loop {

// %y_kv: bf16[2, S/4, 128] = concat(%k, %v, axis=2)
__global__ void concat_y_kv(const hw::bf16* k, const hw::bf16* v, hw::bf16* y_kv, int64_t S) {
  HW_TOUCHES(hw::reads(k, 32 * S), hw::reads(v, 32 * S), hw::writes(y_kv, 64 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(64 * S)) {
      const int64_t i = element / 128;
      const int64_t j = element % 128;
      hw::Values<hw::bf16, kWidth> y_kv_element;
      if (j < 64) {
        const auto k_ij = hw::load<kWidth>(k + i * 64 + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          y_kv_element[e] = k_ij[e];
        }
      } else {
        const auto v_ij = hw::load<kWidth>(v + i * 64 + (j - 64));
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          y_kv_element[e] = v_ij[e];
        }
      }
      hw::store(y_kv + element, y_kv_element);
    }
  };
  if (!hw::aligned(k, v, y_kv)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(64 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

// %y_lse: f32[2, S/4] = fill(value=-inf)
__global__ void fill_y_lse(float* y_lse, int64_t elements) {
  HW_TOUCHES(hw::writes(y_lse, elements));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t i : hw::over_grid<kWidth>(elements)) {
      hw::Values<float, kWidth> y_lse_i;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_lse_i[e] = -INFINITY;
      }
      hw::store(y_lse + i, y_lse_i);
    }
  };
  if (elements % 4 == 0 && hw::aligned(y_lse)) {
    compute(hw::Width<4>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y_max: f32[1, 2, S/4] = max(%y_lse, axis=(0,), keepdims=true)
// %y_shift: f32[1, 2, S/4] = maximum(%y_max, -1e+30)
// %y_subtract: f32[4, 2, S/4] = subtract(%y_lse, %y_shift)
// %y_weights: f32[4, 2, S/4] = exp(%y_subtract)
// %y_sums: f32[1, 2, S/4] = sum(%y_weights, axis=(0,), keepdims=true)
__global__ void fused_y_weights_y_sums(const float* y_lse, float* y_weights, float* y_sums, int64_t S) {
  HW_TOUCHES(hw::reads(y_lse, 2 * S), hw::writes(y_weights, 2 * S), hw::writes(y_sums, S / 2));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth>(hw::Width<kWidth>) {
    for (int64_t j : hw::over_grid<kWidth>(S / 2)) {
      auto y_max = hw::filled<kWidth, float>(-INFINITY);
      for (int64_t i = 0; i < 4; ++i) {
        const auto y_lse_ij = hw::load<kWidth>(y_lse + i * (S / 2) + j);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_lse_e = y_lse_ij[e];
          y_max[e] = hw::Maximum()(y_max[e], y_lse_e);
        }
      }
      auto sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t i = 0; i < 4; ++i) {
        const auto y_lse_ij = hw::load<kWidth>(y_lse + i * (S / 2) + j);
        hw::Values<float, kWidth> y_weights_ij;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_lse_e = y_lse_ij[e];
          const float y_max_e = y_max[e];
          const float y_shift = (y_max_e > -1e+30f || y_max_e != y_max_e) ? y_max_e : -1e+30f;
          const float y_subtract = y_lse_e - y_shift;
          const float y_weights_e = expf(y_subtract);
          sum[e] += y_weights_e;
          y_weights_ij[e] = y_weights_e;
        }
        hw::store(y_weights + i * (S / 2) + j, y_weights_ij);
      }
      hw::Values<float, kWidth> y_sums_j;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_sums_j[e] = sum[e];
      }
      hw::store(y_sums + j, y_sums_j);
    }
  };
  if (S / 2 % 4 == 0 && hw::aligned(y_lse, y_weights, y_sums)) {
    compute(hw::Width<4>());
  } else {
    compute(hw::Width<1>());
  }
}

// %y_maximum: f32[1, 2, S/4] = maximum(%y_sums, 1.0)
// %y_divide: f32[4, 2, S/4] = divide(%y_weights, %y_maximum)
// %y_expand_dims: f32[4, 2, S/4, 1] = reshape(%y_divide)
// %y_greater: bool[4, 2, S/4, 1] = greater(%y_expand_dims, 0.0)
// %y_astype: f32[4, 2, S/4, 64] = astype(%y_blocks)
// %y_multiply: f32[4, 2, S/4, 64] = multiply(%y_astype, %y_expand_dims)
// %y_where: f32[4, 2, S/4, 64] = where(%y_greater, %y_multiply, 0.0)
// %y_sum: f32[2, S/4, 64] = sum(%y_where, axis=(0,))
// %y: bf16[2, S/4, 64] = astype(%y_sum)
__global__ void fused_y(const float* y_sums, const float* y_weights, const hw::bf16* y_blocks, hw::bf16* y, int64_t S) {
  HW_TOUCHES(hw::reads(y_sums, S / 2), hw::reads(y_weights, 2 * S), hw::reads(y_blocks, 128 * S), hw::writes(y, 32 * S));
  hw::griddep_wait();
  const auto compute = [&]<int kWidth, class Index>(hw::Width<kWidth>, Index) {
    for (Index element : hw::over_grid<kWidth, Index>(32 * S)) {
      const int64_t i = element / 64;
      const float y_sums_i = y_sums[i];
      const float y_maximum = (y_sums_i > 1.0f || y_sums_i != y_sums_i) ? y_sums_i : 1.0f;
      auto y_sum = hw::filled<kWidth, hw::Sum<float>>({});
      for (int64_t j = 0; j < 4; ++j) {
        const float y_divide = y_weights[j * (S / 2) + i] / y_maximum;
        const bool y_greater = y_divide > 0.0f;
        const auto y_blocks_elementj = hw::load<kWidth>(y_blocks + j * 32 * S + element);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float y_multiply = y_blocks_elementj.f32(e) * y_divide;
          const float y_where = y_greater ? y_multiply : 0.0f;
          y_sum[e] += y_where;
        }
      }
      hw::Values<hw::bf16, kWidth> y_element;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        y_element[e] = hw::bf16(y_sum[e]);
      }
      hw::store(y + element, y_element);
    }
  };
  if (!hw::aligned(y_blocks, y)) {
    compute(hw::Width<1>(), int64_t());
  } else if (hw::fits_int32(32 * S)) {
    compute(hw::Width<8>(), uint32_t());
  } else {
    compute(hw::Width<8>(), int64_t());
  }
}

}  // namespace programs::keys_in_a_loop
