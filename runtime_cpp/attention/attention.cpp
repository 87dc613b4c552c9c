#include <algorithm>
#include <string>

#include "attention_plans.h"
#include "hostweave/check.h"
#include "hostweave/errors.h"

namespace hw {
namespace {

Heads heads_of(const Strided& x) {
  const int n = x.shape.ndim;
  Heads result{.heads = x.shape[n - 3], .rows = x.shape[n - 2], .size = x.shape[n - 1]};
  result.head_stride = x.strides[n - 3], result.row_stride = x.strides[n - 2];
  if (n > 3) result.batch = x.shape[0], result.batch_stride = x.strides[0];
  return result;
}

// Broadcast dims of a bias have stride 0.
Heads bias_of(const std::optional<Strided>& x) {
  if (!x) return {};
  const int n = x->shape.ndim;
  const auto size = [&](int dim) { return dim <= n ? x->shape[n - dim] : 1; };  // dims counted from the last
  const auto stride = [&](int dim) { return size(dim) == 1 ? 0 : x->strides[n - dim]; };
  return {size(4), size(3), size(2), size(1), stride(4), stride(3), stride(2)};
}

template <class Memory>
void place(HeadsAt<Memory>& at, const Heads& x) {
  at.batch_stride = x.batch_stride, at.head_stride = x.head_stride, at.row_stride = x.row_stride;
}

AttentionKernel called(const AttentionKernel& problem, const void* q, const void* k, const void* v, const void* o,
                       const float* lse, const Beside& beside) {
  AttentionKernel call = problem;
  call.q.base = q, call.k.base = k, call.v.base = v, call.o.base = const_cast<void*>(o), call.bias.base = beside.bias;
  call.lse = const_cast<float*>(lse), call.lengths = beside.lengths, call.offsets = beside.offsets;
  return call;
}

}  // namespace

bool AttentionProblem::is_empty() const { return q.batch == 0 || q.heads == 0 || q.rows == 0 || o.size == 0; }

std::vector<Heads> AttentionProblem::operands() const {
  std::vector<Heads> result{q, k, v, o};
  if (gradients) result.insert(result.end(), {gradients->o, gradients->q, gradients->k, gradients->v});
  return result;
}

Attentions::Attentions(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options) : plans_(rank, dtype, options) {}

PlannedAttention::PlannedAttention(const AttentionProblem& p, const AttentionOptions& options) {
  place(problem.q, p.q), place(problem.k, p.k), place(problem.v, p.v), place(problem.o, p.o), place(problem.bias, p.bias);
  problem.batch = p.q.batch, problem.heads = p.q.heads, problem.groups = p.k.heads;
  problem.rows = p.q.rows, problem.columns = p.k.rows, problem.size = p.q.size, problem.value_size = p.v.size;
  problem.sequences = p.sequences, problem.scale = static_cast<float>(options.scale), problem.causal = options.causal;
  problem.diagonal = p.diagonal, problem.from_end = options.from_end, problem.window = options.window;
  if (!p.gradients) return;
  place(problem.o_gradient, p.gradients->o), place(problem.q_gradient, p.gradients->q);
  place(problem.k_gradient, p.gradients->k), place(problem.v_gradient, p.gradients->v);
  if (!p.gradients->bias) return;
  const Heads& bias = *p.gradients->bias;
  problem.bias_gradient = {{}, bias.batch, bias.heads, bias.rows};
  place(problem.bias_gradient.at, bias);
}

void Attentions::Plans::prepare(const AttentionProblem& problem) {
  if (problem.sequences < 0)
    throw ExecutionError("attention: the tensor of offsets is empty: pass n + 1 offsets for n packed sequences");
  if (std::max(problem.q.size, problem.v.size) > kMostHead)
    throw ExecutionError("attention: heads have at most " + std::to_string(kMostHead) + " elements: use smaller heads");
  current = known.find(problem, [&] {
    if (!problem.is_empty() && !options.blind_zeros) expect_columns(problem);
    return make(problem);
  });
}

const std::shared_ptr<const Attentions::Plans::Plan>& Attentions::Plans::on(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HW_CHECK(cudaStreamGetCaptureInfo(stream, &status));
  const bool in_graph = status != cudaStreamCaptureStatusNone;
  if (in_graph && std::ranges::find(of_graphs, current) == of_graphs.end()) of_graphs.push_back(current);
  return current;
}

void AttentionPlan::prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal,
                            const BesideShapes& beside) {
  plans_->prepare(
      {heads_of(q), heads_of(k), heads_of(v), heads_of(o), diagonal, std::nullopt, bias_of(beside.bias), beside.sequences});
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const auto& plan = plans_->on(stream);
  return plan->attend(called(plan->problem, q, k, v, o, beside.lse, beside), stream);
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const Beside& beside) const {
  const auto& plan = plans_->on(stream);
  AttentionKernel call = called(plan->problem, q, k, v, o, lse, beside);
  call.o_gradient.base = o_gradient, call.q_gradient.base = q_gradient, call.k_gradient.base = k_gradient;
  call.v_gradient.base = v_gradient, call.bias_gradient.at.base = beside.bias_gradient;
  return plan->differentiate(call, stream);
}

void AttentionBackwardPlan::prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o,
                                    const Strided& o_gradient, const Strided& q_gradient, const Strided& k_gradient,
                                    const Strided& v_gradient, int64_t diagonal, const BesideShapes& beside) {
  Gradients gradients{heads_of(o_gradient), heads_of(q_gradient), heads_of(k_gradient), heads_of(v_gradient)};
  if (beside.bias_gradient) gradients.bias = bias_of(beside.bias_gradient);
  plans_->prepare(
      {heads_of(q), heads_of(k), heads_of(v), heads_of(o), diagonal, gradients, bias_of(beside.bias), beside.sequences});
}

// Softmax of a row without columns is undefined.
void Attentions::Plans::expect_columns(const AttentionProblem& problem) const {
  const int64_t rows = problem.q.rows, columns = problem.k.rows, diagonal = problem.diagonal;
  const bool last_sees_none = options.window != 0 && rows - 1 + diagonal - options.window >= columns - 1;
  if (columns == 0 || (options.causal && !options.has_lengths && (diagonal < 0 || last_sees_none))) {
    throw ExecutionError("attention: with " + std::to_string(rows) + " rows of the query and " + std::to_string(columns) +
                         " of the key, some row of the query sees no key: pass at least as many rows of the key as of the query");
  }
}

}  // namespace hw
