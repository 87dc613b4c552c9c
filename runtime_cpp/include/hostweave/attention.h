// Scaled dot-product attention, without the matrix of scores in memory: planned once for each shape, then only enqueued.
#pragma once
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hostweave/matmul.h"
#include "hostweave/plan_cache.h"
#include "hostweave/rank.h"

namespace hw {

struct AttentionOptions {
  double scale = 1;          // of the scores
  bool causal = false;       // a row sees the columns up to the diagonal
  int64_t window = 0;        // and only the last so many of them; 0: all
  bool has_lse = false;      // whether it also gives the logarithms of the sums of exp
  bool has_lengths = false;  // whether columns end where the lengths say
  bool from_end = false;     // and the diagonal begins there
  bool has_bias = false;     // whether something is added to the scores
  bool is_packed = false;    // whether several sequences are packed into one, and a row sees its own alone
  bool blind_zeros = false;  // whether a row that sees no column gets zeros, and is no error
};

// What a call has beside its operands, where the options say so: lse is [batch, heads, rows], the lengths are [batch], offsets
// [batch, sequences + 1]: where sequences begin, and where the last one ends.
struct Beside {
  float* lse = nullptr;
  const int32_t* lengths = nullptr;
  const void* bias = nullptr;
  const int32_t* offsets = nullptr;
};

// Of what a call has beside its operands: the bias broadcasts to the scores, but for its last dim, whose elements lie side by
// side.
struct BesideShapes {
  std::optional<Strided> bias = {};
  int64_t sequences = 0;
};

// An operand as [batch, heads, rows, elements of a row], which lie side by side. Strides are in elements.
struct Heads {
  int64_t batch = 1, heads = 1, rows = 1, size = 1;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  auto operator<=>(const Heads&) const = default;
};

struct Gradients {
  Heads o, q, k, v;

  auto operator<=>(const Gradients&) const = default;
};

struct AttentionProblem {
  Heads q, k, v, o;
  int64_t diagonal = 0;                // row i sees columns up to i + diagonal, or that and its length
  std::optional<Gradients> gradients;  // of what it is the backward pass for
  Heads bias{};                        // of the scores; strides are 0 along what it has once
  int64_t sequences = 0;               // of each of the batch that are packed into one

  auto operator<=>(const AttentionProblem&) const = default;
  bool is_empty() const;
  std::vector<Heads> operands() const;
};

// Plans of the device's library for the last few problems.
class Attentions {
 public:
  Attentions(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options);
  Attentions(const Attentions&) = delete;
  Attentions& operator=(const Attentions&) = delete;

 protected:
  struct Plan;
  // Throws ExecutionError where the device's library cannot, or where a row sees no column, as far as that does not hang on
  // lengths.
  void prepare_for(const AttentionProblem& problem);
  // Of the last problem, for a call on this stream; none where the device has nothing to compute. Where the stream is captured,
  // the plan stays as long as the program: a graph may read what it owns.
  const std::shared_ptr<const Plan>& plan_for(cudaStream_t stream) const;

  const cudaDataType_t dtype_;

 private:
  std::shared_ptr<const Plan> plan(const AttentionProblem& problem) const;
  void expect_columns(const AttentionProblem& problem) const;

  Rank& rank_;
  AttentionOptions options_;
  static constexpr size_t kMostPlans = 128;  // 1 MiB of the host each
  PlanCache<AttentionProblem, std::shared_ptr<const Plan>> plans_{kMostPlans};
  std::shared_ptr<const Plan> current_;
  mutable std::vector<std::shared_ptr<const Plan>> of_graphs_;
};

// o = softmax(scale q kT) v, with consecutive heads of q in groups that have one head of k and v. All operands have three or
// four dims, the batch first where there are four.
class AttentionPlan : Attentions {
 public:
  using Attentions::Attentions;
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal = 0,
               const BesideShapes& beside = {});

  // As prepared last. A row that sees no column gives zeros, and an lse below -1e30; a length is at least 1.
  cudaError_t attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream, const Beside& beside = {}) const;
};

// The gradients of q, k and v by that of o, from what attention gave.
class AttentionBackwardPlan : Attentions {
 public:
  using Attentions::Attentions;
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, const Strided& o_gradient,
               const Strided& q_gradient, const Strided& k_gradient, const Strided& v_gradient, int64_t diagonal = 0,
               const BesideShapes& beside = {});

  cudaError_t differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse, const void* o_gradient,
                            void* q_gradient, void* k_gradient, void* v_gradient, cudaStream_t stream,
                            const Beside& beside = {}) const;

 private:
  cudaError_t clear(void* k_gradient, void* v_gradient, int64_t first, cudaStream_t stream) const;

  Gradients gradients_;
};

}  // namespace hw
