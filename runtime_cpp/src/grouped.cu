// Kernels of plans for grouped matmuls.
#include "hostweave/grouped_kernels.h"

namespace hw {

extern __shared__ char dynamic_shared[];

#define HW_GROUPED(name, T, kRows, kWarpRows, kTransposed)                          \
  __global__ void __launch_bounds__(kGroupedThreads, 2) name(GroupedProblem p, T) { \
    using Product = TileProduct<T, kRows, kWarpRows, false, kTransposed>;           \
    __shared__ alignas(128) T shared[Product::kStage * Product::kStages];           \
    multiply_groups<T, Product, kTransposed>(p, shared);                            \
  }
#define HW_GROUPED_OUTER(T)                                                                            \
  __global__ void __launch_bounds__(kGroupedThreads, 2) multiply_rows_of_groups(GroupedProblem p, T) { \
    using Product = TileProduct<T, 128, 64, true, false>;                                              \
    __shared__ alignas(128) T shared[Product::kStage * Product::kStages];                              \
    multiply_rows_of_groups<T, Product>(p, shared);                                                    \
  }
#define HW_BY_WARPGROUPS(name, T, operands)                                                         \
  __global__ void __launch_bounds__(kWarpgroupThreads, 1)                                           \
      name(const __grid_constant__ GroupedProblem p, const __grid_constant__ GroupedMaps maps, T) { \
    multiply_groups_by_warpgroups<T, Operands::operands>(p, maps, dynamic_shared);                  \
  }
#define HW_GROUPED_PLAIN(T) \
  __global__ void __launch_bounds__(kGroupedThreads) multiply_groups_plain(GroupedProblem p, T) { multiply_groups_plain<T>(p); }

// Each paragraph below is compiled separately.

HW_GROUPED(multiply_groups_by_16, bf16, 16, 16, false)

HW_GROUPED(multiply_groups_by_64, bf16, 64, 32, false)

HW_GROUPED(multiply_groups_by_128, bf16, 128, 64, false)

HW_GROUPED(multiply_groups_transposed_by_16, bf16, 16, 16, true)

HW_GROUPED(multiply_groups_transposed_by_64, bf16, 64, 32, true)

HW_GROUPED(multiply_groups_transposed_by_128, bf16, 128, 64, true)

HW_GROUPED(multiply_groups_by_16, f16, 16, 16, false)

HW_GROUPED(multiply_groups_by_64, f16, 64, 32, false)

HW_GROUPED(multiply_groups_by_128, f16, 128, 64, false)

HW_GROUPED(multiply_groups_transposed_by_16, f16, 16, 16, true)

HW_GROUPED(multiply_groups_transposed_by_64, f16, 64, 32, true)

HW_GROUPED(multiply_groups_transposed_by_128, f16, 128, 64, true)

HW_GROUPED_OUTER(bf16)

HW_GROUPED_OUTER(f16)

HW_BY_WARPGROUPS(multiply_groups_by_warpgroups, bf16, matrices)

HW_BY_WARPGROUPS(multiply_groups_transposed_by_warpgroups, bf16, transposed_matrices)

HW_BY_WARPGROUPS(multiply_rows_of_groups_by_warpgroups, bf16, rows)

HW_BY_WARPGROUPS(multiply_few_rows_of_groups_by_warpgroups, bf16, few_rows)

HW_BY_WARPGROUPS(multiply_groups_by_warpgroups, f16, matrices)

HW_BY_WARPGROUPS(multiply_groups_transposed_by_warpgroups, f16, transposed_matrices)

HW_BY_WARPGROUPS(multiply_rows_of_groups_by_warpgroups, f16, rows)

HW_BY_WARPGROUPS(multiply_few_rows_of_groups_by_warpgroups, f16, few_rows)

HW_GROUPED_PLAIN(float)

HW_GROUPED_PLAIN(double)

}  // namespace hw
