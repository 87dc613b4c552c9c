// cuDNN's attention, by the graphs of its ops.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "cudnn_graph.h"
#include "hostweave/attention.h"
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

cudnnDataType_t type_of(cudaDataType_t dtype) {
  switch (dtype) {
    case CUDA_R_16F:
      return CUDNN_DATA_HALF;
    case CUDA_R_16BF:
      return CUDNN_DATA_BFLOAT16;
    default:
      throw ExecutionError("attention: cuDNN has none of this dtype: cast the operands to f16 or bf16");
  }
}

Dims dims_of(const Heads& x) { return {x.batch, x.heads, x.rows, x.size}; }
Dims strides_of(const Heads& x) { return {x.batch_stride, x.head_stride, x.row_stride, 1}; }
std::shared_ptr<void> allocated(int64_t bytes) {
  void* memory = nullptr;
  HW_CHECK(cudaMalloc(&memory, bytes));
  return {memory, cudaFree};
}

bool are_aligned(const std::vector<const void*>& operands) {
  return std::all_of(operands.begin(), operands.end(),
                     [](const void* x) { return reinterpret_cast<uintptr_t>(x) % kAlignment == 0; });
}

// What a call gives, in this order.
enum Operand : int64_t { kQ = 1, kK, kV, kO, kLse, kOutGradient, kQGradient, kKGradient, kVGradient, kLengths };

using Added = std::vector<std::pair<cudnnPointwiseMode_t, Value>>;

Value index(Graph& graph, const Value& scores, int64_t axis) {
  return graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, scores, {}, {}, CUDNN_DATA_FLOAT, axis);
}
Value compare(Graph& graph, cudnnPointwiseMode_t comparison, const Value& left, const Value& right) {
  return graph.pointwise(comparison, CUDNN_DATA_BOOLEAN, left, right, {}, CUDNN_DATA_BOOLEAN);
}
Value where(Graph& graph, const Value& sees, const Value& scores) {
  return graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, graph.number(-INFINITY), sees);
}

// Scores where a row sees the column, else -inf. The patterns are those that cuDNN looks for.
Value seen(Graph& graph, const Value& scores, cudnnPointwiseMode_t comparison, bool of_rows, const Added& added) {
  const Value row = index(graph, scores, 2), column = index(graph, scores, 3);
  Value left = of_rows ? row : column;
  for (const auto& [mode, term] : added) left = graph.pointwise(mode, term.type, left, term, {}, term.type, 3);
  return where(graph, compare(graph, comparison, left, of_rows ? column : row), scores);
}

Value not_padded(Graph& graph, const Value& scores, const Value& rows, const Value& columns) {
  const Value row = index(graph, scores, 2), column = index(graph, scores, 3);
  const Value is_row = compare(graph, CUDNN_POINTWISE_CMP_LT, row, rows);
  const Value is_column = compare(graph, CUDNN_POINTWISE_CMP_LT, column, columns);
  return where(graph, compare(graph, CUDNN_POINTWISE_LOGICAL_AND, is_row, is_column), scores);
}

// The pattern of one problem, forward or backward: tensors, and the ops on them.
class Pattern {
 public:
  Pattern(Graph& graph, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options)
      : graph_(graph), problem_(problem), type_(type), options_(options) {
    const int64_t batch = problem.q.batch, heads = problem.q.heads, rows = problem.q.rows;
    // No row sees more; but all columns have gradients.
    columns_ = clips() ? std::min(problem.k.rows, rows + problem.diagonal) : problem.k.rows;
    scores_ = {batch, heads, rows, columns_}, of_rows_ = {batch, heads, rows, 1};
    if (options.has_lengths) {
      rows_ = graph.own(CUDNN_DATA_INT32, {batch, 1, 1, 1});
      lengths_ = graph.tensor(kLengths, CUDNN_DATA_INT32, {batch, 1, 1, 1}, {1, 1, 1, 1});
    }
    q_ = of(kQ, problem.q);
  }

  // Of the tensor that says how many rows there are, with lengths.
  int64_t counted() const { return rows_.number; }

  void forward() {
    Heads k = problem_.k, v = problem_.v;
    k.rows = v.rows = columns_;
    const Value scores = masked(scaled(scores_of(of(kK, k, true))));
    const Value largest = graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores);
    const Value powers = exp_of(minus(scores, largest));
    const Value sums = graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, powers);
    const Value logarithms = graph_.pointwise(CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sums);
    // Of the pattern, wanted or not.
    const Value lse = options_.has_lse ? lse_of() : graph_.between(CUDNN_DATA_FLOAT, of_rows_);
    graph_.pointwise_to(lse, CUDNN_POINTWISE_ADD, largest, logarithms);
    const Value weights = graph_.pointwise(CUDNN_POINTWISE_DIV, type_, powers, sums);
    graph_.matmul(weights, of(kV, v), of(kO, problem_.o), {.m = rows_, .k = lengths_});
  }

  // Of the weights p = exp(scores - lse) and their gradients, times p, less the sums of o times its gradient in each row.
  void backward() {
    const Gradients& gradients = *problem_.gradients;
    const Value given = of(kOutGradient, gradients.o), k = of(kK, problem_.k, true);
    const Value both = graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, given, of(kO, problem_.o));
    const Value sums = graph_.own(CUDNN_DATA_FLOAT, of_rows_);
    graph_.pointwise_to(sums, CUDNN_POINTWISE_MUL, graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, both), graph_.number(1.f));

    const Value weights = exp_of(masked(minus(scaled(scores_of(k)), lse_of())));
    to_columns(weights, given, of(kVGradient, gradients.v));

    const Value products = graph_.between(CUDNN_DATA_FLOAT, scores_);
    graph_.matmul(given, of(kV, problem_.v, true), products, {.m = rows_, .n = lengths_});
    const Value changes = scaled(graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, minus(products, sums), weights));
    to_columns(changes, q_, of(kKGradient, gradients.k));

    const Value keys = graph_.between(type_, dims_of(problem_.k), strides_of(problem_.k));
    graph_.reshape(k, keys);
    const Value total = graph_.own(CUDNN_DATA_FLOAT, dims_of(problem_.q));
    graph_.matmul(changes, keys, total, {.m = rows_, .k = lengths_});
    graph_.pointwise_to(of(kQGradient, gradients.q), CUDNN_POINTWISE_IDENTITY, total);
  }

 private:
  bool clips() const { return options_.causal && !options_.has_lengths && !problem_.gradients; }
  Value of(int64_t name, const Heads& x, bool is_turned = false) {
    return is_turned ? graph_.tensor(name, type_, turned(dims_of(x)), turned(strides_of(x)))
                     : graph_.tensor(name, type_, dims_of(x), strides_of(x));
  }
  Value lse_of() { return graph_.tensor(kLse, CUDNN_DATA_FLOAT, of_rows_, row_major(of_rows_)); }

  Value scores_of(const Value& turned_keys) {
    const Value scores = graph_.between(CUDNN_DATA_FLOAT, scores_);
    graph_.matmul(q_, turned_keys, scores, {.m = rows_, .n = lengths_, .padded = lengths_ && !problem_.gradients});
    return scores;
  }
  Value scaled(const Value& scores) {
    const Value scale = graph_.number(static_cast<float>(options_.scale));
    return graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, scores, scale);
  }
  Value minus(const Value& x, const Value& of_rows) {
    return graph_.pointwise(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, x, of_rows);
  }
  Value exp_of(const Value& x) { return graph_.pointwise(CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT, x); }

  // The sums over rows of x by scores, and over the heads of a group.
  void to_columns(const Value& scores, const Value& x, const Value& result) {
    const int64_t batch = scores_[0], heads = scores_[1];
    const Value of_columns = graph_.between(type_, turned(scores_), turned(row_major(scores_)));
    graph_.reshape(scores, of_columns);
    const Ends ends{.m = lengths_, .k = rows_};
    if (result.dims[1] == heads) return graph_.matmul(of_columns, x, result, ends);
    const Value of_heads = graph_.between(type_, {batch, heads, columns_, x.dims[3]});
    graph_.matmul(of_columns, x, of_heads, ends);
    graph_.reduce_to(result, CUDNN_REDUCE_TENSOR_ADD, of_heads);
  }

  // Of lengths, and of a diagonal that begins `diagonal` columns behind the corner.
  Value masked(Value scores) {
    const int64_t diagonal = problem_.diagonal, count = scores_[2];
    const auto integer = [&](int64_t value) { return graph_.number(static_cast<int32_t>(value)); };
    if (lengths_) scores = not_padded(graph_, scores, rows_, lengths_);
    const bool one_sees_all = count == 1 && (options_.from_end ? diagonal == -1 : clips());
    if (options_.causal && !one_sees_all) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, lengths_}, {CUDNN_POINTWISE_SUB, rows_}};
        if (diagonal != -count) added.emplace_back(CUDNN_POINTWISE_ADD, integer(diagonal + count));
      } else if (diagonal) {
        added = {{CUDNN_POINTWISE_ADD, integer(count + diagonal)}, {CUDNN_POINTWISE_SUB, integer(count)}};
      }
      scores = seen(graph_, scores, CUDNN_POINTWISE_CMP_GE, true, added);
    }
    if (options_.window) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, integer(options_.window - diagonal - count)},
                 {CUDNN_POINTWISE_SUB, lengths_},
                 {CUDNN_POINTWISE_ADD, rows_}};
      } else {
        added = {{CUDNN_POINTWISE_ADD, graph_.number(static_cast<float>(options_.window - diagonal))}};
      }
      scores = seen(graph_, scores, CUDNN_POINTWISE_CMP_GT, false, added);
    }
    return scores;
  }

  Graph& graph_;
  const AttentionProblem& problem_;
  cudnnDataType_t type_;
  const AttentionOptions& options_;
  int64_t columns_ = 0;
  Dims scores_{}, of_rows_{};
  Value q_, rows_, lengths_;  // the last two where there are lengths
};

}  // namespace

struct Attentions::Plan {
  cudnnHandle_t handle;
  std::vector<int64_t> names;                // of what a call gives, of what is owned, and of numbers
  std::vector<std::shared_ptr<void>> owned;  // memory beside the caller's
  std::map<int64_t, Number> numbers;
  std::unique_ptr<Descriptor> plan;
  std::shared_ptr<void> workspace;

  Plan(cudnnHandle_t handle, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options)
      : handle(handle) {
    Graph graph;
    Pattern pattern(graph, problem, type, options);
    problem.gradients ? pattern.backward() : pattern.forward();
    names = {kQ, kK, kV, kO};
    if (options.has_lse) names.push_back(kLse);
    if (problem.gradients) names.insert(names.end(), {kOutGradient, kQGradient, kKGradient, kVGradient});
    if (options.has_lengths) names.push_back(kLengths);
    for (const auto& [name, bytes] : graph.owned()) {
      names.push_back(name);
      owned.push_back(allocated(bytes));
      if (options.has_lengths && name == pattern.counted()) {
        const std::vector<int32_t> counts(problem.q.batch, static_cast<int32_t>(problem.q.rows));
        HW_CHECK(cudaMemcpy(owned.back().get(), counts.data(), bytes, cudaMemcpyHostToDevice));
      }
    }
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
    if (bytes > 0) workspace = allocated(bytes);
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
    expect(status, "it has no kernel for these shapes on this GPU; f32 is computed without it: cast the operands");
  }

  // On what a call gives.
  cudaError_t run(std::vector<const void*> values, cudaStream_t stream) const {
    for (const auto& memory : owned) values.push_back(memory.get());
    const void* const scratch = workspace.get();
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
    for (const Heads& x : problem.operands()) {
      const int64_t last = (x.batch - 1) * x.batch_stride + (x.heads - 1) * x.head_stride + (x.rows - 1) * x.row_stride;
      elements = std::max(elements, last + x.size);
    }
    const std::shared_ptr<void> scratch = allocated(elements * 2);
    HW_CHECK(cudaMemsetAsync(scratch.get(), 0, elements * 2, stream));
    HW_CHECK(run(std::vector<const void*>(names.size() - owned.size() - numbers.size(), scratch.get()), stream));
    HW_CHECK(cudaStreamSynchronize(stream));
  }

  static constexpr int kMostEngines = 8;
};

std::shared_ptr<const Attentions::Plan> Attentions::plan(const AttentionProblem& problem) const {
  if (problem.is_empty()) return nullptr;
  for (const Heads& x : problem.operands()) {
    constexpr int64_t step = kAlignment / 2;  // elements
    if (x.size % step || x.batch_stride % step || x.head_stride % step || x.row_stride % step) {
      throw ExecutionError(
          "attention: cuDNN reads 16 bytes at once, and rows of an operand do not begin at multiples of 8 elements: "
          "copy it first");
    }
  }
  auto plan = std::make_shared<const Plan>(handle_of(rank_), problem, type_of(dtype_), options_);
  plan->load_kernels(problem, rank_.stream("ring", 0));
  return plan;
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const auto& plan = plan_for(stream);
  if (!plan) return cudaSuccess;
  std::vector<const void*> values{q, k, v, o};
  if (beside.lse) values.push_back(beside.lse);
  if (!are_aligned(values)) return cudaErrorMisalignedAddress;
  if (beside.lengths) values.push_back(beside.lengths);
  return plan->run(std::move(values), stream);
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const int32_t* lengths) const {
  const auto& plan = plan_for(stream);
  if (!plan) return clear(k_gradient, v_gradient, stream);
  std::vector<const void*> values{q, k, v, o, lse, o_gradient, q_gradient, k_gradient, v_gradient};
  if (!are_aligned(values)) return cudaErrorMisalignedAddress;
  if (lengths) values.push_back(lengths);
  return plan->run(std::move(values), stream);
}

// What columns have that no row sees.
cudaError_t AttentionBackwardPlan::clear(void* k_gradient, void* v_gradient, cudaStream_t stream) const {
  for (const auto& [gradient, x] : {std::pair{k_gradient, gradients_.k}, std::pair{v_gradient, gradients_.v}}) {
    if (x.rows * x.size == 0) continue;
    for (int64_t i = 0; i < x.batch * x.heads; ++i) {
      const int64_t offset = i / x.heads * x.batch_stride + i % x.heads * x.head_stride;
      const cudaError_t status =
          cudaMemset2DAsync(static_cast<char*>(gradient) + offset * 2, x.row_stride * 2, 0, x.size * 2, x.rows, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace hw
