// Grouped matmuls: products of groups of rows. The bounds of the groups are in device memory, and the host never reads them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/grouped_problem.h"
#include "hostweave/matmul.h"

namespace hw {

struct GroupedTypes {
  cudaDataType_t operands, result;  // If operands have 16 bits, the result may be f32; then the f32 sums are not rounded.
};

inline size_t bytes_of(cudaDataType_t dtype) { return dtype == CUDA_R_64F ? 8 : dtype == CUDA_R_32F ? 4 : 2; }

// Loads the kernels of a problem.
void load_grouped(const GroupedTypes& types, const GroupedProblem& problem);
cudaError_t launch_grouped(const GroupedTypes& types, const GroupedProblem& problem, cudaStream_t stream);

// Group e contains the global rows starts[e] to ends[e] - 1. In `multiply`, row 0 of x is global row `first`. Groups
// do not overlap, and non-empty groups are in the order of their rows.
class GroupedPlan {
 public:
  GroupedPlan(Rank&, cudaDataType_t operands, cudaDataType_t result) : types_{operands, result} {}

  // If `other` is [E, K, N], `multiply` will multiply group e of the rows of x [T, K] by matrix e. The result is [T, N]; rows
  // without a group are zeros. If `other` is [T, N], `multiply` will multiply, for each group, the transposed rows of x by the
  // rows of `other`. The result is [E, K, N]; the results of empty groups are zeros. Throws ExecutionError if no kernel supports
  // the layouts.
  void prepare(const Strided& x, const Strided& other, const Strided& result);

  // Uses the shapes of the last prepare.
  cudaError_t multiply(const void* x, const void* other, const int32_t* starts, const int32_t* ends, void* result,
                       cudaStream_t stream, int64_t first = 0) const;

 private:
  GroupedTypes types_;
  GroupedProblem shapes_{};
};

}  // namespace hw
