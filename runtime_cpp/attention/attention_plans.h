// Attention problems and plans, common to CUDA and the CPU device.
#pragma once
#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hostweave/attention.h"
#include "hostweave/attention_kernel.h"
#include "hostweave/plan_cache.h"

namespace hw {

// An operand as [batch, heads, rows, contiguous elements]. Strides are in elements.
struct Heads {
  int64_t batch = 1, heads = 1, rows = 1, size = 1;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  auto operator<=>(const Heads&) const = default;
};

struct Gradients {
  Heads o, q, k, v;
  std::optional<Heads> bias = {};

  auto operator<=>(const Gradients&) const = default;
};

struct AttentionProblem {
  Heads q, k, v, o;
  int64_t diagonal = 0;                // if causal: row i attends to columns up to i + diagonal, plus the length if `from_end`
  std::optional<Gradients> gradients;  // set for a backward pass
  Heads bias{};                        // bias of the scores; strides are 0 along broadcast dims
  int64_t sequences = 0;               // packed sequences per batch element

  auto operator<=>(const AttentionProblem&) const = default;
  bool is_empty() const;
  std::vector<Heads> operands() const;
};

struct PlannedAttention {
  PlannedAttention(const AttentionProblem& problem, const AttentionOptions& options);
  virtual ~PlannedAttention() = default;

  // Executes the plan with the addresses in `call`.
  virtual cudaError_t attend(const AttentionKernel& call, cudaStream_t stream) const = 0;
  virtual cudaError_t differentiate(const AttentionKernel& call, cudaStream_t stream) const = 0;

  AttentionKernel problem{};  // without addresses
};

struct Attentions::Plans {
  using Plan = PlannedAttention;

  Plans(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options) : rank(rank), dtype(dtype), options(options) {}

  void prepare(const AttentionProblem& problem);
  // Returns the plan of the last problem, for a call on this stream. If the stream is being captured, keeps the plan until the
  // program is destroyed, because graphs may use memory of the plan.
  const std::shared_ptr<const Plan>& on(cudaStream_t stream) const;
  std::shared_ptr<const Plan> make(const AttentionProblem& problem) const;
  void expect_columns(const AttentionProblem& problem) const;

  Rank& rank;
  const cudaDataType_t dtype;
  const AttentionOptions options;
  static constexpr size_t kMostPlans = 128;  // A plan takes 1 MiB of host memory.
  PlanCache<AttentionProblem, std::shared_ptr<const Plan>> known{kMostPlans};
  std::shared_ptr<const Plan> current;
  mutable std::vector<std::shared_ptr<const Plan>> of_graphs;
};

}  // namespace hw
