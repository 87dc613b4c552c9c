// Attention by cuDNN graphs. The kernels of this package compute bias gradients, and the problems that cuDNN does not support.
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
  return std::ranges::all_of(operands, [](const void* x) { return reinterpret_cast<uintptr_t>(x) % kAlignment == 0; });
}

// Zeroes rows `begin` to `end` of every head.
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

constexpr uint16_t kLeast = 0xfefe;  // both 16-bit halves of the f32 number -1.7e38

cudaError_t outside(void* base, const Heads& x, const AttentionProblem& p, const int32_t* offsets, uint16_t value,
                    cudaStream_t stream) {
  return fill_outside({offsets, x.batch, p.sequences, x.heads, x.rows, x.size, static_cast<uint16_t*>(base), x.batch_stride,
                       x.head_stride, x.row_stride, value},
                      stream);
}

constexpr int64_t kPackedStep = 16, kLeastPacked = 32;  // cuDNN gets packed heads of 32, 48, 64, ... elements

// True for packed problems that cuDNN was observed to compute correctly. The gradient of the queries is wrong unless the head
// size is a multiple of 16. Heads of size 16 once caused an illegal instruction. With grouped heads, the gradients of k and v are
// wrong if heads are the outer dim and tokens the inner: cuDNN multiplies sequence offsets by the number of heads in the group.
bool packs(const AttentionProblem& p) {
  if (p.q.size != p.v.size || p.q.size % kPackedStep || p.q.size < kLeastPacked) return false;
  if (!p.gradients || p.k.heads == p.q.heads || p.k.heads == 1) return true;
  const Gradients& gradients = *p.gradients;
  return gradients.k.head_stride < gradients.k.row_stride && gradients.v.head_stride < gradients.v.row_stride;
}

// True if the kernels of this package compute a problem, because cuDNN does not support it. cuDNN supports only 16-bit floats,
// and only packed problems that `packs` accepts. With a bias, cuDNN supports no window. In causal attention with a bias, the
// diagonal must start at the top left, or the only row of q must attend to all columns. In causal attention with
// lengths, the diagonal must contain a corner of the scores. If the diagonal starts after the first column and reaches the last
// column before the last row, cuDNN supports no window and no backward pass.
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

// Arguments that all cuDNN plans of a problem have in common.
struct EngineSettings {
  cudnnHandle_t handle = nullptr;
  cudnnDataType_t type{};
  std::vector<cudaStream_t> streams;  // streams on which calls of the plans may run concurrently
};

// cuDNN plan of one problem.
class Engine {
 public:
  Engine(const EngineSettings& settings, const AttentionProblem& problem, const AttentionOptions& options, int64_t lse_rows)
      : handle(settings.handle) {
    Graph graph;
    Pattern pattern(graph, problem, settings.type, options, lse_rows);
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
    for (const cudaStream_t stream : settings.streams) workspaces.emplace_back(stream, bytes > 0 ? allocated(bytes) : nullptr);
  }

  // Executes the plan with the addresses of a call's operands.
  cudaError_t run(std::vector<const void*> values, cudaStream_t stream, const int32_t* offsets = nullptr) const {
    if (packed) {
      PackedSequences of_call = *packed;
      of_call.offsets = offsets;
      if (const cudaError_t status = place_sequences(of_call, stream); status != cudaSuccess) return status;
    }
    for (const auto& memory : owned) values.push_back(memory.get());
    auto of_stream = std::ranges::find(workspaces, stream, &std::pair<cudaStream_t, std::shared_ptr<void>>::first);
    if (of_stream == workspaces.end()) of_stream = workspaces.begin();  // the caller's stream uses the first workspace
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

  // Runs the plan once on zeros to load its kernels; see MatmulPlan::load_kernels.
  void load_kernels(const AttentionProblem& problem, cudaStream_t stream) const {
    // Size of the log-sum-exps, in 16-bit elements.
    int64_t elements = problem.q.batch * problem.q.heads * problem.q.rows * 2;
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
    for (const auto& [name, offsets] : pattern.offsets()) {
      made.operands[made.count++] = {own(offsets.value.number), offsets.batch_stride, offsets.row_stride};
    }
    packed = made;
  }

  // Selects the first recommended engine for which cuDNN can build a plan.
  void choose(const Descriptor& ops) {
    Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, ops);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode)
        .finish("the engines that cuDNN recommends for attention");
    std::list<Descriptor> made;
    std::vector<cudnnBackendDescriptor_t> found;
    for (int i = 0; i < kMostEngines; ++i) found.push_back(made.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    int64_t count = 0;
    expect(cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, kMostEngines, &count,
                                    found.data()),
           "the engines that cuDNN recommends for attention");
    cudnnStatus_t status = CUDNN_STATUS_NOT_SUPPORTED;
    for (int64_t i = 0; i < count && status != CUDNN_STATUS_SUCCESS; ++i) {
      plan = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, &found[i]);
      status = cudnnBackendFinalize(*plan);
      if (status != CUDNN_STATUS_SUCCESS) cudaGetLastError();  // clears the last error
    }
    expect(status, "no kernel for these shapes on this GPU; cast the operands to f32, which needs no cuDNN");
  }

  cudnnHandle_t handle;
  std::vector<int64_t> names;                // ids of the tensors: first the arguments of a call, then owned memory, then scalars
  std::vector<std::shared_ptr<void>> owned;  // memory owned by the plan
  std::map<int64_t, Number> numbers;
  std::optional<PackedSequences> packed;
  std::unique_ptr<Descriptor> plan;
  std::vector<std::pair<cudaStream_t, std::shared_ptr<void>>>
      workspaces;  // one per stream, because kernels keep counters in a workspace
  static constexpr int kMostEngines = 8;
};

// Describes packed sequences to cuDNN, with one batch element per sequence. The maximum length of a sequence is the number of
// rows of a batch element.
AttentionProblem of_sequences(AttentionProblem p) {
  std::vector<Heads*> operands{&p.q, &p.k, &p.v, &p.o};
  if (p.gradients) operands.insert(operands.end(), {&p.gradients->o, &p.gradients->q, &p.gradients->k, &p.gradients->v});
  for (Heads* x : operands) {
    if ((x->batch - 1) * x->batch_stride + x->rows * x->row_stride > INT32_MAX) {
      throw ExecutionError("attention: an operand of packed sequences spans 2^31 elements or more: shard its heads");
    }
    x->batch *= p.sequences;
  }
  return p;
}

// Layout of a contiguous array of the same shape.
Heads packed(const Heads& x) { return {x.batch, x.heads, x.rows, x.size, x.heads * x.rows * x.size, x.rows * x.size, x.size}; }

// Up to two cuDNN plans for a problem. cuDNN needs a diagonal that contains a corner of the scores. So the plans omit rows that
// attend to no column. If the last rows attend to all columns, a plan without a mask computes these rows. In a backward pass, the
// plan without a mask may instead compute gradients of columns to which all rows attend.
struct OnCuda : PlannedAttention {
  struct Part {
    int64_t first;  // first row of the part, or first column if `add_columns` made the part
    Engine engine;
  };
  const AttentionProblem whole;
  const AttentionKernels* kernels = nullptr;  // kernels of this package, if used
  bool is_alone = false;                      // true if the problem needs only `kernels`
  int64_t blind = 0;                          // leading rows that attend to no column
  int64_t columns = whole.k.rows;             // columns up to the last to which a row attends
  std::list<Part> parts;
  std::shared_ptr<void> terms;  // gradient of the queries by the first of two parts
  AddedRows sums{};             // adds `terms` to the gradient of the queries

  OnCuda(const AttentionProblem& whole, const AttentionOptions& options) : PlannedAttention(whole, options), whole(whole) {}

  void add_kernels(const AttentionOptions& options) {
    if (!options.kernels) {
      throw ExecutionError("attention: cuDNN does not support this problem: add `kernels` to the instruction");
    }
    kernels = options.kernels;
    HW_CHECK(load_attention(*kernels));
  }

  void add_parts(const EngineSettings& settings, AttentionOptions options) {
    if (wants_bias(whole)) add_kernels(options);
    const int64_t rows = whole.q.rows, diagonal = whole.diagonal;
    const bool in_corner = !options.causal || options.has_lengths || options.is_packed;
    if (!in_corner) {
      blind = std::clamp<int64_t>(-diagonal, 0, rows);
      columns = std::clamp<int64_t>(rows + diagonal, 0, columns);
    }
    if (columns == 0) blind = rows;
    if (whole.gradients && !in_corner && !options.window && diagonal > 0 && columns == rows + diagonal && has_sums()) {
      const Heads& q = whole.gradients->q;
      terms = allocated(q.batch * q.heads * q.rows * q.size * 2);
      const HeadsAt<void> to{nullptr, q.batch_stride, q.head_stride, q.row_stride};
      sums = {settings.type == CUDNN_DATA_HALF, q.batch, q.heads, q.rows, q.size, to, terms.get()};
      add_columns(settings, diagonal, columns, options);
      options.causal = false;
      add_columns(settings, 0, diagonal, options);
      return;
    }
    const bool sees_more = !in_corner && diagonal + blind > 0;
    // Rows from `limited` on attend to all columns.
    const int64_t limited = sees_more ? std::clamp(columns - diagonal, blind, rows) : rows;
    add_rows_of(settings, blind, limited, options);
    options.causal = false;
    add_rows_of(settings, limited, rows, options);
  }

  void add_columns(const EngineSettings& settings, int64_t first, int64_t end, const AttentionOptions& options) {
    AttentionProblem problem = whole;
    Gradients& gradients = *problem.gradients;
    problem.diagonal = 0;
    problem.k.rows = problem.v.rows = gradients.k.rows = gradients.v.rows = end - first;
    if (parts.empty()) gradients.q = packed(whole.q);
    add(settings, first, problem, options);
  }

  void add_rows_of(const EngineSettings& settings, int64_t first, int64_t end, const AttentionOptions& options) {
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
    if (problem.q.batch != 0) add(settings, first, problem, options);
  }

  void add(const EngineSettings& settings, int64_t first, const AttentionProblem& problem, const AttentionOptions& options) {
    parts.emplace_back(first, Engine(settings, problem, options, whole.q.rows));
    parts.back().engine.load_kernels(whole, settings.streams.front());
  }

  cudaError_t attend(const AttentionKernel& call, cudaStream_t stream) const override {
    if (kernels) return hw::attend(*kernels, call, stream);
    if (whole.is_empty()) return cudaSuccess;
    const Heads &q_heads = whole.q, &o_heads = whole.o;
    const int64_t rows = q_heads.rows;
    if (call.offsets) {
      const Heads of_lse{q_heads.batch, q_heads.heads, rows, 2, q_heads.heads * rows * 2, rows * 2, 2};
      HW_CHECK(outside(call.o.base, o_heads, whole, call.offsets, 0, stream));
      if (call.lse) HW_CHECK(outside(call.lse, of_lse, whole, call.offsets, kLeast, stream));
    }
    cudaError_t status = clear(call.o.base, o_heads, 0, blind, stream);
    if (status == cudaSuccess && call.lse && blind) {
      status = cudaMemset2DAsync(call.lse, rows * sizeof(float), kLeast & 0xff, blind * sizeof(float),
                                 q_heads.batch * q_heads.heads, stream);
    }
    for (const auto& [first, engine] : parts) {
      if (status != cudaSuccess) return status;
      std::vector<const void*> values{static_cast<const char*>(call.q.base) + first * q_heads.row_stride * 2, call.k.base,
                                      call.v.base, static_cast<const char*>(call.o.base) + first * o_heads.row_stride * 2};
      if (!are_aligned(values)) return cudaErrorMisalignedAddress;
      if (call.lse) values.push_back(call.lse + first);
      status = run(engine, std::move(values), call, stream);
    }
    return status;
  }

  cudaError_t differentiate(const AttentionKernel& call, cudaStream_t stream) const override {
    void *const q_gradient = call.q_gradient.base, *const k_gradient = call.k_gradient.base,
                *const v_gradient = call.v_gradient.base;
    const Gradients& gradients = *whole.gradients;
    if (kernels && gradients.bias) HW_CHECK(hw::differentiate_bias(*kernels, call, stream));
    if (is_alone) return hw::differentiate(*kernels, call, stream);
    if (call.offsets && !whole.is_empty()) {
      HW_CHECK(outside(q_gradient, gradients.q, whole, call.offsets, 0, stream));
      HW_CHECK(outside(k_gradient, gradients.k, whole, call.offsets, 0, stream));
      HW_CHECK(outside(v_gradient, gradients.v, whole, call.offsets, 0, stream));
      if (parts.empty()) return cudaSuccess;
    }
    // No row attends to the columns from `unseen` on, so their gradients are zero.
    const int64_t unseen = parts.empty() ? 0 : columns;
    cudaError_t status = clear(k_gradient, gradients.k, unseen, gradients.k.rows, stream);
    if (status == cudaSuccess) status = clear(v_gradient, gradients.v, unseen, gradients.v.rows, stream);
    const auto at = [](const void* base, const Heads& x, int64_t row) {
      return static_cast<const char*>(base) + row * x.row_stride * 2;
    };
    for (const auto& [first, engine] : parts) {
      if (status != cudaSuccess) return status;
      const void* const of_queries = terms && first ? terms.get() : q_gradient;
      std::vector<const void*> values{call.q.base, at(call.k.base, whole.k, first), at(call.v.base, whole.v, first)};
      values.insert(values.end(), {call.o.base, call.lse, call.o_gradient.base, of_queries});
      values.insert(values.end(), {at(k_gradient, gradients.k, first), at(v_gradient, gradients.v, first)});
      if (!are_aligned(values)) return cudaErrorMisalignedAddress;
      status = run(engine, std::move(values), call, stream);
    }
    if (status != cudaSuccess || !terms) return status;
    AddedRows rows = sums;
    rows.to.base = q_gradient;
    return add_rows(rows, stream);
  }

 private:
  static cudaError_t run(const Engine& engine, std::vector<const void*> values, const AttentionKernel& call,
                         cudaStream_t stream) {
    if (call.lengths) values.push_back(call.lengths);
    if (call.bias.base) values.push_back(call.bias.base);
    return engine.run(std::move(values), stream, call.offsets);
  }
};

}  // namespace

std::shared_ptr<const PlannedAttention> Attentions::Plans::make(const AttentionProblem& problem) const {
  auto plan = std::make_shared<OnCuda>(problem, options);
  const bool has_zeros = problem.is_empty() && wants_bias(problem);
  plan->is_alone = has_zeros || is_by_kernels(dtype, problem, options);
  if (plan->is_alone) plan->add_kernels(options);
  if (plan->is_alone || problem.is_empty()) return plan;
  for (const Heads& x : problem.operands()) {
    const Dims strides = strides_of(x);
    if (x.size % kStep || std::any_of(strides.begin(), strides.end() - 1, [](int64_t stride) { return stride % kStep; })) {
      throw ExecutionError(
          "attention: cuDNN reads 16 bytes at once, and rows of an operand or result do not begin at multiples of 8 elements; "
          "copy or pad these rows");
    }
  }
  EngineSettings settings{handle_of(rank), dtype == CUDA_R_16F ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16, {}};
  for (int i = 0; i < options.streams; ++i) settings.streams.push_back(rank.stream(kLoopStreams, i));
  plan->add_parts(settings, options);
  return plan;
}

}  // namespace hw
