#include <hostweave_cpu.h>

#include "hostweave/attention.h"

namespace hw {
namespace {

hw_cpu_heads heads(const Heads& x) { return {x.batch, x.heads, x.rows, x.size, x.batch_stride, x.head_stride, x.row_stride}; }

}  // namespace

struct AttentionPlan::Plan {
  hw_cpu_attention problem;
};

std::shared_ptr<const AttentionPlan::Plan> AttentionPlan::plan(const AttentionProblem& problem) const {
  const auto& [q, k, v, o, diagonal] = problem;
  const float scale = static_cast<float>(options_.scale);
  return std::make_shared<const Plan>(Plan{
      {dtype_, heads(q), heads(k), heads(v), heads(o), scale, options_.causal, diagonal, options_.window, options_.from_end}});
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  return current_ ? hw_cpu_attend(&current_->problem, q, k, v, o, beside.lse, beside.lengths, stream) : cudaSuccess;
}

}  // namespace hw
