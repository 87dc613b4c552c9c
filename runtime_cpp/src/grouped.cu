// Kernels of plans for grouped matmuls.
#include "hostweave/grouped_kernels.h"

namespace hw {

#define HW_GROUPED(name, T, kRows, kWarpRows, kTransposed)                          \
  __global__ void __launch_bounds__(kGroupedThreads, 2) name(GroupedProblem p, T) { \
    multiply_groups<T, kRows, kWarpRows, kTransposed>(p);                           \
  }
#define HW_GROUPED_OUTER(T)                                                                            \
  __global__ void __launch_bounds__(kGroupedThreads, 2) multiply_rows_of_groups(GroupedProblem p, T) { \
    multiply_rows_of_groups<T>(p);                                                                     \
  }
#define HW_GROUPED_PLAIN(T) \
  __global__ void __launch_bounds__(kGroupedThreads) multiply_groups_plain(GroupedProblem p, T) { multiply_groups_plain<T>(p); }

// The paragraphs below are compiled each by itself.

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

HW_GROUPED_PLAIN(float)

HW_GROUPED_PLAIN(double)

}  // namespace hw
