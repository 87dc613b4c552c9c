// Scaled dot-product attention that does not materialise the scores. `prepare` finds or makes a plan; calls only enqueue work.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/hidden.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"

namespace hw {

// CUDA kernels for one dtype and maximum head size, in a separate library. Members are null on the CPU device and without nvcc.
struct AttentionKernels;
extern const AttentionKernels attention_f32_64, attention_f32_128, attention_f32_256;
extern const AttentionKernels attention_f16_64, attention_f16_128, attention_f16_256;
extern const AttentionKernels attention_bf16_64, attention_bf16_128, attention_bf16_256;

struct AttentionOptions {
  double scale = 1;                           // scale of the scores
  bool causal = false;                        // a row attends to columns up to the diagonal
  int64_t window = 0;                         // a row attends only to the last `window` of these columns; 0: to all
  bool has_lse = false;                       // also returns the log-sum-exp of each row of scores
  bool has_lengths = false;                   // each batch element has a length: the number of its valid columns
  bool from_end = false;                      // the number of valid columns is added to the diagonal
  bool has_bias = false;                      // a bias is added to the scores
  bool is_packed = false;                     // sequences are packed; a row attends only to columns of its sequence
  bool blind_zeros = false;                   // a row without columns gives zeros instead of an error
  int streams = 1;                            // number of streams on which calls of the plan may run concurrently
  const AttentionKernels* kernels = nullptr;  // for bias gradients, and for problems that cuDNN does not support
};

// Optional operands of a call. lse is [batch, heads, rows], and lengths are [batch]. Offsets are [batch, sequences + 1]: the
// starts of the sequences, and the end of the last sequence.
struct Beside {
  float* lse = nullptr;
  const int32_t* lengths = nullptr;
  const void* bias = nullptr;
  const int32_t* offsets = nullptr;
  void* bias_gradient = nullptr;
};

// Shapes of optional operands. The bias may be broadcast in all dims but the last. The last dim of the bias is contiguous.
struct BesideShapes {
  std::optional<Strided> bias = {};
  int64_t sequences = 0;
  std::optional<Strided> bias_gradient = {};  // has the shape of the bias; nullopt if not needed
};

// Base of the two classes below. Keeps the plans of the most recent problems.
class Attentions {
 public:
  Attentions(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options);

 protected:
  struct Plans;
  Hidden<Plans> plans_;
};

// o = softmax(scale q kT + bias) v, with an optional bias. Groups of consecutive heads of q share one head of k and v.
// q, k, v and o have three dims, or four with the batch first.
class AttentionPlan : Attentions {
 public:
  using Attentions::Attentions;
  // Throws ExecutionError if the problem is not supported. Unless `blind_zeros` is set, it is also an error if there are no
  // columns, or if the diagonal and window leave a row without columns. With lengths, the diagonal and window are not checked.
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal = 0,
               const BesideShapes& beside = {});

  // Uses the shapes of the last prepare. A row without columns gives zeros and an lse below -1e30. Lengths must be at least 1.
  cudaError_t attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream, const Beside& beside = {}) const;
};

// Gradients of q, k, v and optionally the bias. Inputs are the gradient of o, and the operands and results of the forward pass.
class AttentionBackwardPlan : Attentions {
 public:
  using Attentions::Attentions;
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, const Strided& o_gradient,
               const Strided& q_gradient, const Strided& k_gradient, const Strided& v_gradient, int64_t diagonal = 0,
               const BesideShapes& beside = {});

  cudaError_t differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse, const void* o_gradient,
                            void* q_gradient, void* k_gradient, void* v_gradient, cudaStream_t stream,
                            const Beside& beside = {}) const;
};

}  // namespace hw
