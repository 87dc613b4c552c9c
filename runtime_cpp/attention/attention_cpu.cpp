#include <hostweave_cpu.h>

#include "hostweave/attention.h"

namespace hw {
namespace {

hw_cpu_heads heads(const Heads& x) { return {x.batch, x.heads, x.rows, x.size, x.batch_stride, x.head_stride, x.row_stride}; }

}  // namespace

struct Attentions::Plan {
  hw_cpu_attention problem;
  hw_cpu_attention_gradients gradients;
};

std::shared_ptr<const Attentions::Plan> Attentions::plan(const AttentionProblem& problem) const {
  const auto& [q, k, v, o, diagonal, gradients, bias, sequences] = problem;
  const float scale = static_cast<float>(options_.scale);
  Plan made{{dtype_, heads(q), heads(k), heads(v), heads(o), scale, options_.causal, diagonal, options_.window, options_.from_end,
             heads(bias), sequences},
            {}};
  if (gradients) made.gradients = {heads(gradients->o), heads(gradients->q), heads(gradients->k), heads(gradients->v)};
  return std::make_shared<const Plan>(made);
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const hw_cpu_attention_masks masks{beside.lengths, beside.bias, beside.offsets};
  return hw_cpu_attend(&plan_for(stream)->problem, q, k, v, o, beside.lse, &masks, stream);
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const Beside& beside) const {
  const Plan& plan = *plan_for(stream);
  const hw_cpu_attention_masks masks{beside.lengths, beside.bias, beside.offsets};
  return hw_cpu_attend_backward(&plan.problem, &plan.gradients, q, k, v, o, lse, o_gradient, q_gradient, k_gradient, v_gradient,
                                &masks, stream);
}

}  // namespace hw
