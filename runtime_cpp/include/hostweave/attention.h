// Scaled dot-product attention, without the matrix of scores in memory: planned once for each shape, then only enqueued.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "hostweave/hidden.h"
#include "hostweave/matmul.h"
#include "hostweave/rank.h"

namespace hw {

// Kernels of this package for CUDA, by dtype and the most elements of a head. Each is a library of its own, which programs are
// linked with that may need it; elsewhere they are empty.
struct AttentionKernels;
extern const AttentionKernels attention_f32_64, attention_f32_128, attention_f32_256;
extern const AttentionKernels attention_f16_64, attention_f16_128, attention_f16_256;
extern const AttentionKernels attention_bf16_64, attention_bf16_128, attention_bf16_256;

struct AttentionOptions {
  double scale = 1;                           // of the scores
  bool causal = false;                        // a row sees the columns up to the diagonal
  int64_t window = 0;                         // and only the last so many of them; 0: all
  bool has_lse = false;                       // whether it also gives the logarithms of the sums of exp
  bool has_lengths = false;                   // whether columns end where the lengths say
  bool from_end = false;                      // and the diagonal begins there
  bool has_bias = false;                      // whether something is added to the scores
  bool is_packed = false;                     // whether several sequences are packed into one, and a row sees its own alone
  bool blind_zeros = false;                   // whether a row that sees no column gets zeros, and is no error
  int streams = 1;                            // of the pool "ring", that it runs on at once
  const AttentionKernels* kernels = nullptr;  // where the device's library may not do
};

// What a call has beside its operands, where the options say so: lse is [batch, heads, rows], the lengths are [batch], offsets
// [batch, sequences + 1]: where sequences begin, and where the last one ends.
struct Beside {
  float* lse = nullptr;
  const int32_t* lengths = nullptr;
  const void* bias = nullptr;
  const int32_t* offsets = nullptr;
  void* bias_gradient = nullptr;
};

// Of what a call has beside its operands: the bias broadcasts to the scores, but for its last dim, whose elements lie side by
// side.
struct BesideShapes {
  std::optional<Strided> bias = {};
  int64_t sequences = 0;
  std::optional<Strided> bias_gradient = {};  // where it is wanted: of the bias's shape
};

// Plans of the device's library for the last few problems.
class Attentions {
 public:
  Attentions(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options);

 protected:
  struct Plans;
  Hidden<Plans> plans_;
};

// o = softmax(scale q kT) v, with consecutive heads of q in groups that have one head of k and v. All operands have three or
// four dims, the batch first where there are four.
class AttentionPlan : Attentions {
 public:
  using Attentions::Attentions;
  // Throws ExecutionError where the device's library cannot, or where a row sees no column, as far as that does not hang on
  // lengths.
  void prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal = 0,
               const BesideShapes& beside = {});

  // As prepared last. A row that sees no column gives zeros, and an lse below -1e30; a length is at least 1.
  cudaError_t attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream, const Beside& beside = {}) const;
};

// The gradients of q, k and v by that of o, and of the bias where it is wanted, from what attention gave.
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
