#include <hostweave_cpu.h>

#include "attention_plans.h"

namespace hw {
namespace {

hw_cpu_heads heads(const Heads& x) { return {x.batch, x.heads, x.rows, x.size, x.batch_stride, x.head_stride, x.row_stride}; }

}  // namespace

struct AttentionKernels {};
const AttentionKernels attention_f32_64{}, attention_f32_128{}, attention_f32_256{};
const AttentionKernels attention_f16_64{}, attention_f16_128{}, attention_f16_256{};
const AttentionKernels attention_bf16_64{}, attention_bf16_128{}, attention_bf16_256{};

struct Attentions::Plans::Plan {
  hw_cpu_attention problem;
  hw_cpu_attention_gradients gradients;
};

std::shared_ptr<const Attentions::Plans::Plan> Attentions::Plans::make(const AttentionProblem& problem) const {
  const auto& [q, k, v, o, diagonal, gradients, bias, sequences] = problem;
  const float scale = static_cast<float>(options.scale);
  Plan made{{dtype, heads(q), heads(k), heads(v), heads(o), scale, options.causal, diagonal, options.window, options.from_end,
             heads(bias), sequences},
            {}};
  if (gradients) {
    const auto& [of_o, of_q, of_k, of_v, of_bias] = *gradients;
    made.gradients = {heads(of_o), heads(of_q), heads(of_k), heads(of_v), heads(of_bias.value_or(Heads{}))};
  }
  return std::make_shared<const Plan>(made);
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const hw_cpu_attention_masks masks{beside.lengths, beside.bias, beside.offsets};
  return hw_cpu_attend(&plans_->on(stream)->problem, q, k, v, o, beside.lse, &masks, stream);
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const Beside& beside) const {
  const Plans::Plan& plan = *plans_->on(stream);
  const hw_cpu_attention_masks masks{beside.lengths, beside.bias, beside.offsets};
  return hw_cpu_attend_backward(&plan.problem, &plan.gradients, q, k, v, o, lse, o_gradient, q_gradient, k_gradient, v_gradient,
                                beside.bias_gradient, &masks, stream);
}

}  // namespace hw
