// Scaled dot-product attention, without the matrix of scores in memory: planned once for each shape, then only enqueued.
#pragma once
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <memory>

#include "hostweave/matmul.h"
#include "hostweave/plan_cache.h"
#include "hostweave/rank.h"

namespace hw {

struct AttentionOptions {
  double scale = 1;      // of the scores
  bool causal = false;   // a row sees the columns up to the diagonal
  int64_t window = 0;    // and only the last so many of them; 0: all
  bool has_lse = false;  // whether it also gives the logarithms of the sums of exp
};

// An operand as [batch, heads, rows, elements of a row], which lie side by side. Strides are in elements.
struct Heads {
  int64_t batch = 1, heads = 1, rows = 1, size = 1;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  auto operator<=>(const Heads&) const = default;
};

struct AttentionProblem {
  Heads q, k, v, o;
  int64_t diagonal = 0;  // row i sees columns up to i + diagonal

  auto operator<=>(const AttentionProblem&) const = default;
};

// o = softmax(scale q kT) v, with consecutive heads of q in groups that have one head of k and v.
class AttentionPlan {
 public:
  AttentionPlan(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options);
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  // For these operands of three or four dims, the batch first where there are four. Throws ExecutionError where the device's
  // library cannot, or where a row sees no column.
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal = 0);

  // As prepared last. lse, where the options ask for it, is [batch, heads, rows].
  cudaError_t attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream, float* lse = nullptr) const;

 private:
  struct Plan;
  std::shared_ptr<const Plan> plan(const AttentionProblem& problem) const;
  void expect_columns(const AttentionProblem& problem) const;

  Rank& rank_;
  cudaDataType_t dtype_;
  AttentionOptions options_;
  static constexpr size_t kMostPlans = 128;                                     // 1 MiB of the host each
  PlanCache<AttentionProblem, std::shared_ptr<const Plan>> plans_{kMostPlans};  // none where o has no elements
  std::shared_ptr<const Plan> current_;
};

}  // namespace hw
