// cuDNN's attention, by the graphs of its ops; what it has not by kernels.
#include <algorithm>
#include <memory>
#include <utility>

#include "attention_launch.h"
#include "attention_pattern.h"
#include "hostweave/check.h"

namespace hw {
namespace {

cudnnHandle_t handle_of(Rank& rank) {
  Handle& known = rank.handle("cudnn");
  if (!known.handle) {
    cudnnHandle_t made = nullptr;
    expect(cudnnCreate(&made), "cudnnCreate");
    known = {made, [](void* handle) { cudnnDestroy(static_cast<cudnnHandle_t>(handle)); }};
  }
  return static_cast<cudnnHandle_t>(known.handle);
}

std::shared_ptr<void> allocated(int64_t bytes) {
  void* memory = nullptr;
  HW_CHECK(cudaMalloc(&memory, bytes));
  return {memory, cudaFree};
}

bool are_aligned(const std::vector<const void*>& operands) {
  return std::all_of(operands.begin(), operands.end(),
                     [](const void* x) { return reinterpret_cast<uintptr_t>(x) % kAlignment == 0; });
}

// Zeros in some rows.
cudaError_t clear(void* base, const Heads& x, int64_t begin, int64_t end, cudaStream_t stream) {
  if (begin >= end || x.size == 0) return cudaSuccess;
  for (int64_t i = 0; i < x.batch * x.heads; ++i) {
    const int64_t offset = i / x.heads * x.batch_stride + i % x.heads * x.head_stride + begin * x.row_stride;
    const cudaError_t status =
        cudaMemset2DAsync(static_cast<char*>(base) + offset * 2, x.row_stride * 2, 0, x.size * 2, end - begin, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

constexpr uint16_t kLeast = 0xfefe;  // of which the halves of -1.7e38 are

// Fills tokens that are of no sequence.
cudaError_t outside(void* base, const Heads& x, const AttentionProblem& p, const int32_t* offsets, uint16_t value,
                    cudaStream_t stream) {
  return fill_outside({offsets, x.batch, p.sequences, x.heads, x.rows, x.size, static_cast<uint16_t*>(base), x.batch_stride,
                       x.head_stride, x.row_stride, value},
                      stream);
}

template <class Memory>
HeadsAt<Memory> heads_at(const Heads& x, const void* base) {
  return {const_cast<Memory*>(base), x.batch_stride, x.head_stride, x.row_stride};
}

constexpr int64_t kPackedStep = 16, kLeastPacked = 32;  // elements of a head

// Whether cuDNN has packed sequences such as these: what it was seen to compute right. Of heads whose elements are no multiple of
// 16 the gradient of the queries is wrong, and a program of heads of 16 once ended in an illegal instruction. Gradients of
// grouped heads are wrong where what a token has does not lie side by side: it takes the places of a group's head, times the
// heads of the group, to be those of all heads.
bool packs(const AttentionProblem& p) {
  if (p.q.size != p.v.size || p.q.size % kPackedStep || p.q.size < kLeastPacked) return false;
  if (!p.gradients || p.k.heads == p.q.heads || p.k.heads == 1) return true;
  const Gradients& gradients = *p.gradients;
  return gradients.k.head_stride < gradients.k.row_stride && gradients.v.head_stride < gradients.v.row_stride;
}

// Whether it is by kernels of ours: beside a bias cuDNN knows no diagonal but that of the top left, with lengths none that begins
// in no corner, and where the last rows see all columns before the last one it has no window, and no backward pass.
bool is_by_kernels(cudaDataType_t dtype, const AttentionProblem& p, const AttentionOptions& options) {
  const int64_t rows = p.q.rows, columns = p.k.rows, diagonal = p.diagonal;
  if (dtype == CUDA_R_32F || (options.is_packed && !packs(p))) return true;
  const bool at_top_left = !options.from_end && diagonal == 0;
  const bool one_sees_all = rows == 1 && (options.from_end || diagonal >= columns - 1);
  if (options.has_bias && (options.window || (options.causal && !at_top_left && !one_sees_all))) return true;
  if (!options.causal) return false;
  if (options.has_lengths) return diagonal != (options.from_end ? -rows : 0);
  return (options.window || p.gradients) && diagonal > 0 && rows + diagonal > columns;
}

bool wants_bias(const AttentionProblem& p) { return p.gradients && p.gradients->bias; }

// A problem without the addresses of a call.
AttentionKernel for_kernels(const AttentionProblem& p, const AttentionOptions& options) {
  if (std::max(p.q.size, p.v.size) > kMostHead) {
    throw ExecutionError("attention: heads have at most 256 elements where cuDNN has no attention: use smaller ones");
  }
  AttentionKernel result{};
  result.sequences = p.sequences;
  result.batch = p.q.batch, result.heads = p.q.heads, result.groups = p.k.heads, result.rows = p.q.rows,
  result.columns = p.k.rows;
  result.size = p.q.size, result.value_size = p.v.size, result.scale = static_cast<float>(options.scale);
  result.causal = options.causal, result.diagonal = p.diagonal, result.from_end = options.from_end,
  result.window = options.window;
  return result;
}

// With those of a call.
AttentionKernel at(AttentionKernel result, const AttentionProblem& p, const void* q, const void* k, const void* v, const void* o,
                   const float* lse, const Beside& beside) {
  result.q = heads_at<const void>(p.q, q), result.k = heads_at<const void>(p.k, k), result.v = heads_at<const void>(p.v, v);
  result.o = heads_at<void>(p.o, o), result.bias = heads_at<const void>(p.bias, beside.bias);
  result.lse = const_cast<float*>(lse), result.lengths = beside.lengths, result.offsets = beside.offsets;
  return result;
}

// What cuDNN has planned for a problem.
class Engine {
 public:
  Engine(cudnnHandle_t handle, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options,
         int64_t lse_rows, const std::vector<cudaStream_t>& streams)
      : handle(handle) {
    Graph graph;
    Pattern pattern(graph, problem, type, options, lse_rows);
    problem.gradients ? pattern.backward() : pattern.forward();
    names = {kQ, kK, kV, kO};
    if (options.has_lse) names.push_back(kLse);
    if (problem.gradients) names.insert(names.end(), {kOutGradient, kQGradient, kKGradient, kVGradient});
    if (options.has_lengths) names.push_back(kLengths);
    if (options.has_bias) names.push_back(kBias);
    for (const auto& [name, bytes] : graph.owned()) {
      names.push_back(name);
      owned.push_back(allocated(bytes));
      if (options.has_lengths && name == pattern.counted()) {
        const std::vector<int32_t> counts(problem.q.batch, static_cast<int32_t>(problem.q.rows));
        HW_CHECK(cudaMemcpy(owned.back().get(), counts.data(), bytes, cudaMemcpyHostToDevice));
      }
    }
    if (options.is_packed) pack(problem, pattern);
    numbers = graph.numbers();
    for (const auto& [name, number] : numbers) names.push_back(name);
    Descriptor ops(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    ops.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, graph.ops().data(),
            static_cast<int64_t>(graph.ops().size()));
    ops.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle).finish("the graph of attention");
    choose(ops);
    int64_t count = 0, bytes = 0;
    expect(cudnnBackendGetAttribute(*plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &bytes),
           "the workspace");
    for (const cudaStream_t stream : streams) workspaces.emplace_back(stream, bytes > 0 ? allocated(bytes) : nullptr);
  }

  // On what a call gives.
  cudaError_t run(std::vector<const void*> values, cudaStream_t stream, const int32_t* offsets = nullptr) const {
    if (packed) {
      PackedSequences of_call = *packed;
      of_call.offsets = offsets;
      if (const cudaError_t status = place_sequences(of_call, stream); status != cudaSuccess) return status;
    }
    for (const auto& memory : owned) values.push_back(memory.get());
    auto of_stream = std::ranges::find(workspaces, stream, &std::pair<cudaStream_t, std::shared_ptr<void>>::first);
    if (of_stream == workspaces.end()) of_stream = workspaces.begin();  // the caller's
    const void* const scratch = of_stream->second.get();
    for (const auto& [name, number] : numbers) {
      values.push_back(std::visit([](const auto& value) { return static_cast<const void*>(&value); }, number));
    }
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const auto count = static_cast<int64_t>(values.size());
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, names.data(), count);
    pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, values.data(), count);
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &scratch).finish("the arguments of attention");
    expect(cudnnSetStream(handle, stream), "cudnnSetStream");
    expect(cudnnBackendExecute(handle, *plan, pack), "attention");
    return cudaSuccess;
  }

  // Loads the kernels, as MatmulPlan::load_kernels does, and why: it runs once on zeros that nobody looks at.
  void load_kernels(const AttentionProblem& problem, cudaStream_t stream) const {
    int64_t elements = problem.q.batch * problem.q.heads * problem.q.rows * 2;  // of lse, in halves
    elements = std::max(elements, problem.q.batch * (problem.sequences + 1) * 2);
    std::vector<Heads> operands = problem.operands();
    operands.push_back(problem.bias);
    for (const Heads& x : operands) {
      const int64_t last = (x.batch - 1) * x.batch_stride + (x.heads - 1) * x.head_stride + (x.rows - 1) * x.row_stride;
      elements = std::max(elements, last + x.size);
    }
    const std::shared_ptr<void> scratch = allocated(elements * 2);
    HW_CHECK(cudaMemsetAsync(scratch.get(), 0, elements * 2, stream));
    const std::vector<const void*> values(names.size() - owned.size() - numbers.size(), scratch.get());
    HW_CHECK(run(values, stream, static_cast<const int32_t*>(scratch.get())));
    HW_CHECK(cudaStreamSynchronize(stream));
  }

 private:
  void pack(const AttentionProblem& problem, const Pattern& pattern) {
    const auto own = [&](int64_t name) {
      const auto first = names.end() - static_cast<int64_t>(owned.size());
      return static_cast<int32_t*>(owned[std::find(first, names.end(), name) - first].get());
    };
    HW_CHECK(load_packing());
    PackedSequences made{};
    made.batch = problem.q.batch / problem.sequences, made.sequences = problem.sequences;
    made.rows = own(pattern.counted()), made.columns = own(pattern.ends());
    for (const auto& [name, places] : pattern.places()) {
      made.operands[made.count++] = {own(places.value.number), places.batch_stride, places.row_stride};
    }
    packed = made;
  }

  // The first of what cuDNN recommends that works here.
  void choose(const Descriptor& ops) {
    Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, ops);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode).finish("what is recommended for attention");
    std::list<Descriptor> made;
    std::vector<cudnnBackendDescriptor_t> found;
    for (int i = 0; i < kMostEngines; ++i) found.push_back(made.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    int64_t count = 0;
    expect(cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, kMostEngines, &count,
                                    found.data()),
           "what is recommended for attention");
    cudnnStatus_t status = CUDNN_STATUS_NOT_SUPPORTED;
    for (int64_t i = 0; i < count && status != CUDNN_STATUS_SUCCESS; ++i) {
      plan = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, &found[i]);
      status = cudnnBackendFinalize(*plan);
      if (status != CUDNN_STATUS_SUCCESS) cudaGetLastError();  // or the caller's next check finds it
    }
    expect(status, "it has no kernel for these shapes on this GPU; attention of f32 is computed without it: cast the operands");
  }

  cudnnHandle_t handle;
  std::vector<int64_t> names;                // of what a call gives, of what is owned, and of numbers
  std::vector<std::shared_ptr<void>> owned;  // memory beside the caller's
  std::map<int64_t, Number> numbers;
  std::optional<PackedSequences> packed;
  std::unique_ptr<Descriptor> plan;
  std::vector<std::pair<cudaStream_t, std::shared_ptr<void>>> workspaces;  // kernels count in them what they have done
  static constexpr int kMostEngines = 8;
};

// What columns have that no row sees.
cudaError_t clear(const Gradients& of, void* k_gradient, void* v_gradient, int64_t first, cudaStream_t stream) {
  const cudaError_t status = clear(k_gradient, of.k, first, of.k.rows, stream);
  return status == cudaSuccess ? clear(v_gradient, of.v, first, of.v.rows, stream) : status;
}

// A batch for each sequence, of as many rows as all have together.
AttentionProblem of_sequences(AttentionProblem p) {
  std::vector<Heads*> operands{&p.q, &p.k, &p.v, &p.o};
  if (p.gradients) operands.insert(operands.end(), {&p.gradients->o, &p.gradients->q, &p.gradients->k, &p.gradients->v});
  for (Heads* x : operands) {
    if ((x->batch - 1) * x->batch_stride + x->rows * x->row_stride > INT32_MAX) {
      throw ExecutionError("attention: of packed sequences an operand reaches over more than 2^31 elements: shard its heads");
    }
    x->batch *= p.sequences;
  }
  return p;
}

// Rows that lie one behind the other.
Heads packed(const Heads& x) { return {x.batch, x.heads, x.rows, x.size, x.heads * x.rows * x.size, x.rows * x.size, x.size}; }

}  // namespace

// Some of the rows, from the first on, see nothing. Under a diagonal that is behind a corner the last ones see all columns.
// A backward pass under a diagonal that begins further right computes also what that hides: it is of the columns that all rows
// see, without a mask, then of the others, and the gradient of the queries is the sum of both.
struct Attentions::Plans::Plan {
  struct Part {
    int64_t first;  // row; of a backward pass column
    Engine engine;
  };
  std::optional<AttentionKernel> kernel;  // where kernels of this package compute something,
  bool is_alone = false;                  // or all of it
  const AttentionProblem whole;
  int64_t blind = 0;               // rows
  int64_t columns = whole.k.rows;  // that some row sees
  std::list<Part> parts;
  std::shared_ptr<void> terms;  // of the gradient of the queries, by the first one of two parts

  Plan(const AttentionProblem& whole, const AttentionOptions& options) : is_alone(true), whole(whole) { add_kernel(options); }

  Plan(cudnnHandle_t handle, const AttentionProblem& whole, cudnnDataType_t type, AttentionOptions options,
       const std::vector<cudaStream_t>& streams)
      : whole(whole) {
    if (wants_bias(whole)) add_kernel(options);
    const int64_t rows = whole.q.rows, diagonal = whole.diagonal;
    const bool in_corner = !options.causal || options.has_lengths || options.is_packed;
    if (!in_corner) {
      blind = std::clamp<int64_t>(-diagonal, 0, rows);
      columns = std::clamp<int64_t>(rows + diagonal, 0, columns);
    }
    if (columns == 0) blind = rows;
    if (whole.gradients && !in_corner && !options.window && diagonal > 0 && columns == rows + diagonal && has_sums()) {
      add_columns(handle, diagonal, columns, type, options, streams);
      terms = allocated(whole.q.batch * whole.q.heads * rows * whole.q.size * 2);
      options.causal = false;
      add_columns(handle, 0, diagonal, type, options, streams);
      return;
    }
    const bool sees_more = !in_corner && diagonal + blind > 0;
    const int64_t limited = sees_more ? std::clamp(columns - diagonal, blind, rows) : rows;  // from here on rows see all
    add(handle, blind, limited, type, options, streams);
    options.causal = false;
    add(handle, limited, rows, type, options, streams);
  }

  void add_kernel(const AttentionOptions& options) {
    kernel = for_kernels(whole, options);
    if (!options.kernels) {
      throw ExecutionError("attention: cuDNN has none of these sizes, and the instruction names no kernels: add `kernels` to it");
    }
    HW_CHECK(load_attention(*options.kernels));
  }

  void add_columns(cudnnHandle_t handle, int64_t first, int64_t end, cudnnDataType_t type, const AttentionOptions& options,
                   const std::vector<cudaStream_t>& streams) {
    AttentionProblem problem = whole;
    Gradients& gradients = *problem.gradients;
    problem.diagonal = 0;
    problem.k.rows = problem.v.rows = gradients.k.rows = gradients.v.rows = end - first;
    if (parts.empty()) gradients.q = packed(whole.q);
    parts.emplace_back(first, Engine(handle, problem, type, options, whole.q.rows, streams));
    parts.back().engine.load_kernels(whole, streams.front());
  }

  void add(cudnnHandle_t handle, int64_t first, int64_t end, cudnnDataType_t type, const AttentionOptions& options,
           const std::vector<cudaStream_t>& streams) {
    if (first == end) return;
    AttentionProblem problem = whole;
    problem.q.rows = problem.o.rows = end - first, problem.diagonal += first;
    problem.k.rows = problem.v.rows = columns;
    if (options.causal && !options.has_lengths) problem.k.rows = problem.v.rows = std::min(columns, end + whole.diagonal);
    if (problem.gradients) {
      problem.gradients->q.rows = problem.gradients->o.rows = end - first;
      problem.gradients->k.rows = problem.gradients->v.rows = problem.k.rows;
    }
    if (options.is_packed) problem = of_sequences(problem);
    if (problem.q.batch == 0) return;
    parts.emplace_back(first, Engine(handle, problem, type, options, whole.q.rows, streams));
    parts.back().engine.load_kernels(whole, streams.front());
  }
};

std::shared_ptr<const Attentions::Plans::Plan> Attentions::Plans::make(const AttentionProblem& problem) const {
  const bool has_zeros = problem.is_empty() && wants_bias(problem);
  if (has_zeros || is_by_kernels(dtype, problem, options)) return std::make_shared<const Plan>(problem, options);
  if (problem.is_empty()) return nullptr;
  for (const Heads& x : problem.operands()) {
    const Dims strides = strides_of(x);
    if (x.size % kStep || std::any_of(strides.begin(), strides.end() - 1, [](int64_t stride) { return stride % kStep; })) {
      throw ExecutionError(
          "attention: cuDNN reads 16 bytes at once, and rows of an operand do not begin at multiples of 8 elements: "
          "copy it first");
    }
  }
  const cudnnDataType_t type = dtype == CUDA_R_16F ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
  std::vector<cudaStream_t> streams;
  for (int i = 0; i < options.streams; ++i) streams.push_back(rank.stream("ring", i));
  return std::make_shared<const Plan>(handle_of(rank), problem, type, options, streams);
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const auto& current = plans_->on(stream);
  if (!current) return cudaSuccess;
  const AttentionProblem& problem = current->whole;
  if (current->kernel) {
    return hw::attend(*plans_->options.kernels, at(*current->kernel, problem, q, k, v, o, beside.lse, beside), stream);
  }
  const Heads &q_heads = problem.q, &o_heads = problem.o;
  if (beside.offsets) {
    const Heads of_lse{q_heads.batch, q_heads.heads, q_heads.rows, 2, q_heads.heads * q_heads.rows * 2, q_heads.rows * 2, 2};
    HW_CHECK(outside(o, o_heads, problem, beside.offsets, 0, stream));
    if (beside.lse) HW_CHECK(outside(beside.lse, of_lse, problem, beside.offsets, kLeast, stream));
  }
  const int64_t blind = current->blind, rows = q_heads.rows;
  cudaError_t status = clear(o, o_heads, 0, blind, stream);
  if (status == cudaSuccess && beside.lse && blind) {
    status = cudaMemset2DAsync(beside.lse, rows * sizeof(float), kLeast & 0xff, blind * sizeof(float),
                               q_heads.batch * q_heads.heads, stream);
  }
  for (const auto& [first, engine] : current->parts) {
    if (status != cudaSuccess) return status;
    std::vector<const void*> values{static_cast<const char*>(q) + first * q_heads.row_stride * 2, k, v,
                                    static_cast<const char*>(o) + first * o_heads.row_stride * 2};
    if (!are_aligned(values)) return cudaErrorMisalignedAddress;
    if (beside.lse) values.push_back(beside.lse + first);
    if (beside.lengths) values.push_back(beside.lengths);
    if (beside.bias) values.push_back(beside.bias);
    status = engine.run(std::move(values), stream, beside.offsets);
  }
  return status;
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const Beside& beside) const {
  const auto& current = plans_->on(stream);
  const Gradients& gradients = *plans_->gradients;
  if (!current) return clear(gradients, k_gradient, v_gradient, 0, stream);
  if (current->kernel) {
    AttentionKernel kernel = at(*current->kernel, current->whole, q, k, v, o, lse, beside);
    kernel.o_gradient = heads_at<const void>(gradients.o, o_gradient);
    kernel.q_gradient = heads_at<void>(gradients.q, q_gradient);
    kernel.k_gradient = heads_at<void>(gradients.k, k_gradient), kernel.v_gradient = heads_at<void>(gradients.v, v_gradient);
    if (gradients.bias) {
      const Heads& of_bias = *gradients.bias;
      kernel.bias_gradient = {heads_at<void>(of_bias, beside.bias_gradient), of_bias.batch, of_bias.heads, of_bias.rows};
      HW_CHECK(hw::differentiate_bias(*plans_->options.kernels, kernel, stream));
    }
    if (current->is_alone) return hw::differentiate(*plans_->options.kernels, kernel, stream);
  }
  if (beside.offsets) {
    HW_CHECK(outside(q_gradient, gradients.q, current->whole, beside.offsets, 0, stream));
    HW_CHECK(outside(k_gradient, gradients.k, current->whole, beside.offsets, 0, stream));
    HW_CHECK(outside(v_gradient, gradients.v, current->whole, beside.offsets, 0, stream));
    if (current->parts.empty()) return cudaSuccess;
  }
  if (current->parts.empty()) return clear(gradients, k_gradient, v_gradient, 0, stream);
  if (const cudaError_t status = clear(gradients, k_gradient, v_gradient, current->columns, stream); status != cudaSuccess)
    return status;
  const AttentionProblem& problem = current->whole;
  const auto at = [](const void* base, const Heads& x, int64_t row) {
    return static_cast<const char*>(base) + row * x.row_stride * 2;
  };
  for (const auto& [first, engine] : current->parts) {
    const void* const of_queries = current->terms && first ? current->terms.get() : q_gradient;
    std::vector<const void*> values{q,
                                    at(k, problem.k, first),
                                    at(v, problem.v, first),
                                    o,
                                    lse,
                                    o_gradient,
                                    of_queries,
                                    at(k_gradient, gradients.k, first),
                                    at(v_gradient, gradients.v, first)};
    if (!are_aligned(values)) return cudaErrorMisalignedAddress;
    if (beside.lengths) values.push_back(beside.lengths);
    if (beside.bias) values.push_back(beside.bias);
    const cudaError_t status = engine.run(std::move(values), stream, beside.offsets);
    if (status != cudaSuccess || !current->terms) return status;
  }
  const Heads& sums = gradients.q;
  return add_rows({plans_->dtype == CUDA_R_16F, sums.batch, sums.heads, sums.rows, sums.size, heads_at<void>(sums, q_gradient),
                   current->terms.get()},
                  stream);
}

}  // namespace hw
