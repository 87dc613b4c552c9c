// cuDNN's attention, by the graphs of its ops; of f32, which it has not, by kernels.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "attention_f32_launch.h"
#include "attention_plans.h"
#include "cudnn_graph.h"
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
      throw ExecutionError("attention: there is none of this dtype: cast the operands to f16, bf16 or f32");
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

// The pattern of one problem, forward or backward: tensors, and the ops on them.
class Pattern {
 public:
  Pattern(Graph& graph, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options, int64_t lse_rows)
      : graph_(graph), problem_(problem), type_(type), options_(options), lse_rows_(lse_rows) {
    const int64_t batch = problem.q.batch, heads = problem.q.heads, rows = problem.q.rows;
    scores_ = {batch, heads, rows, problem.k.rows}, of_rows_ = {batch, heads, rows, 1};
    if (options.has_lengths) {
      rows_ = graph.own(CUDNN_DATA_INT32, {batch, 1, 1, 1});
      lengths_ = graph.tensor(kLengths, CUDNN_DATA_INT32, {batch, 1, 1, 1}, {1, 1, 1, 1});
    }
    q_ = of(kQ, problem.q);
  }

  // Of the tensor that says how many rows there are, with lengths.
  int64_t counted() const { return rows_.number; }

  void forward() {
    const Value scores = masked(scaled(scores_of(of(kK, problem_.k, true))));
    const Value largest = graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores);
    const Value powers = exp_of(minus(scores, largest));
    const Value sums = graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, powers);
    const Value logarithms = graph_.pointwise(CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sums);
    // Of the pattern, wanted or not.
    const Value lse = options_.has_lse ? lse_of() : graph_.between(CUDNN_DATA_FLOAT, of_rows_);
    graph_.pointwise_to(lse, CUDNN_POINTWISE_ADD, largest, logarithms);
    const Value weights = graph_.pointwise(CUDNN_POINTWISE_DIV, type_, powers, sums);
    graph_.matmul(weights, of(kV, problem_.v), of(kO, problem_.o), {.m = rows_, .k = lengths_});
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
  Value of(int64_t name, const Heads& x, bool is_turned = false) {
    return is_turned ? graph_.tensor(name, type_, turned(dims_of(x)), turned(strides_of(x)))
                     : graph_.tensor(name, type_, dims_of(x), strides_of(x));
  }
  Value lse_of() { return graph_.tensor(kLse, CUDNN_DATA_FLOAT, of_rows_, row_major({of_rows_[0], of_rows_[1], lse_rows_, 1})); }

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
    const Value of_heads = graph_.between(type_, {batch, heads, scores_[3], x.dims[3]});
    graph_.matmul(of_columns, x, of_heads, ends);
    graph_.reduce_to(result, CUDNN_REDUCE_TENSOR_ADD, of_heads);
  }

  // Of lengths, and of a diagonal that begins in a corner: for cuDNN another is none, whatever is added to a row.
  Value masked(Value scores) {
    const int64_t diagonal = problem_.diagonal, count = scores_[2];
    const auto integer = [&](int64_t value) { return graph_.number(static_cast<int32_t>(value)); };
    if (lengths_) scores = not_padded(graph_, scores, rows_, lengths_);
    const bool one_sees_all = count == 1 && (options_.from_end || !lengths_);
    if (options_.causal && !one_sees_all) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, lengths_}, {CUDNN_POINTWISE_SUB, rows_}};
      } else if (diagonal) {
        added = {{CUDNN_POINTWISE_ADD, integer(count + diagonal)}, {CUDNN_POINTWISE_SUB, integer(count)}};
      }
      scores = seen(graph_, scores, CUDNN_POINTWISE_CMP_GE, true, added);
    }
    if (options_.window) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, integer(options_.window)}, {CUDNN_POINTWISE_SUB, lengths_}, {CUDNN_POINTWISE_ADD, rows_}};
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
  const int64_t lse_rows_;  // of which those of the problem are some
  Dims scores_{}, of_rows_{};
  Value q_, rows_, lengths_;  // the last two where there are lengths
};

template <class T>
HeadsAt<T> heads_at(const Heads& x) {
  return {nullptr, x.batch_stride, x.head_stride, x.row_stride};
}

// A problem without the addresses of a call.
AttentionF32 in_f32(const AttentionProblem& p, const AttentionOptions& options) {
  if (std::max(p.q.size, p.v.size) > kMostHead) {
    throw ExecutionError("attention: heads of f32 have at most 256 elements: use smaller ones");
  }
  AttentionF32 result{};
  result.q = heads_at<const float>(p.q), result.k = heads_at<const float>(p.k), result.v = heads_at<const float>(p.v);
  result.o = heads_at<float>(p.o);
  result.batch = p.q.batch, result.heads = p.q.heads, result.groups = p.k.heads, result.rows = p.q.rows,
  result.columns = p.k.rows;
  result.size = p.q.size, result.value_size = p.v.size, result.scale = static_cast<float>(options.scale);
  result.causal = options.causal, result.diagonal = p.diagonal, result.from_end = options.from_end,
  result.window = options.window;
  if (!p.gradients) return result;
  result.o_gradient = heads_at<const float>(p.gradients->o), result.q_gradient = heads_at<float>(p.gradients->q);
  result.k_gradient = heads_at<float>(p.gradients->k), result.v_gradient = heads_at<float>(p.gradients->v);
  return result;
}

// What cuDNN has planned for a problem.
class Engine {
 public:
  Engine(cudnnHandle_t handle, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options,
         int64_t lse_rows)
      : handle(handle) {
    Graph graph;
    Pattern pattern(graph, problem, type, options, lse_rows);
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

 private:
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
  std::unique_ptr<Descriptor> plan;
  std::shared_ptr<void> workspace;
  static constexpr int kMostEngines = 8;
};

// What columns have that no row sees.
cudaError_t clear(const Gradients& of, void* k_gradient, void* v_gradient, int64_t first, cudaStream_t stream) {
  const cudaError_t status = clear(k_gradient, of.k, first, of.k.rows, stream);
  return status == cudaSuccess ? clear(v_gradient, of.v, first, of.v.rows, stream) : status;
}

}  // namespace

// Some of the rows, from the first on, see nothing. Under a diagonal that is behind a corner the last ones see all columns.
struct Attentions::Plans::Plan {
  struct Part {
    int64_t first;  // row
    Engine engine;
  };
  std::optional<AttentionF32> f32;  // where that is all there is of it
  const AttentionProblem whole;
  int64_t blind = 0;               // rows
  int64_t columns = whole.k.rows;  // that some row sees
  std::list<Part> parts;

  Plan(const AttentionProblem& whole, const AttentionOptions& options) : f32(in_f32(whole, options)), whole(whole) {
    HW_CHECK(load_attention_f32(*f32));
  }

  Plan(cudnnHandle_t handle, const AttentionProblem& whole, cudnnDataType_t type, AttentionOptions options, cudaStream_t stream)
      : whole(whole) {
    const int64_t rows = whole.q.rows, diagonal = whole.diagonal;
    const bool in_corner = !options.causal || (options.has_lengths && diagonal == (options.from_end ? -rows : 0));
    if (options.has_lengths && !in_corner) {
      throw ExecutionError("attention: with lengths and a causal mask cuDNN takes all rows: do not shard those of the query");
    }
    if (!in_corner) {
      blind = std::clamp<int64_t>(-diagonal, 0, rows);
      columns = std::clamp<int64_t>(rows + diagonal, 0, columns);
    }
    if (columns == 0) blind = rows;
    const bool sees_more = !in_corner && diagonal + blind > 0;
    const int64_t limited = sees_more ? std::clamp(columns - diagonal, blind, rows) : rows;  // from here on rows see all
    if (limited < rows && (options.window || whole.gradients)) {
      throw ExecutionError(
          "attention: cuDNN has no window, and no backward pass, where the last rows of a rank are behind the last column: "
          "pass as many keys as rows, or do not shard the rows");
    }
    add(handle, blind, limited, type, options, stream);
    options.causal = false;
    add(handle, limited, rows, type, options, stream);
  }

  void add(cudnnHandle_t handle, int64_t first, int64_t end, cudnnDataType_t type, const AttentionOptions& options,
           cudaStream_t stream) {
    if (first == end) return;
    AttentionProblem problem = whole;
    problem.q.rows = problem.o.rows = end - first, problem.diagonal += first;
    problem.k.rows = problem.v.rows = columns;
    if (options.causal && !options.has_lengths) problem.k.rows = problem.v.rows = std::min(columns, end + whole.diagonal);
    if (problem.gradients) {
      problem.gradients->q.rows = problem.gradients->o.rows = end - first;
      problem.gradients->k.rows = problem.gradients->v.rows = problem.k.rows;
    }
    parts.emplace_back(first, Engine(handle, problem, type, options, whole.q.rows));
    parts.back().engine.load_kernels(problem, stream);
  }
};

std::shared_ptr<const Attentions::Plans::Plan> Attentions::Plans::make(const AttentionProblem& problem) const {
  if (dtype == CUDA_R_32F) return std::make_shared<const Plan>(problem, options);
  if (problem.is_empty()) return nullptr;
  for (const Heads& x : problem.operands()) {
    constexpr int64_t step = kAlignment / 2;  // elements
    if (x.size % step || x.batch_stride % step || x.head_stride % step || x.row_stride % step) {
      throw ExecutionError(
          "attention: cuDNN reads 16 bytes at once, and rows of an operand do not begin at multiples of 8 elements: "
          "copy it first");
    }
  }
  return std::make_shared<const Plan>(handle_of(rank), problem, type_of(dtype), options, rank.stream("ring", 0));
}

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream,
                                  const Beside& beside) const {
  const auto& current = plans_->on(stream);
  if (!current) return cudaSuccess;
  if (std::optional<AttentionF32> p = current->f32) {
    const auto read = [](const void* base) { return static_cast<const float*>(base); };
    p->q.base = read(q), p->k.base = read(k), p->v.base = read(v), p->o.base = static_cast<float*>(o);
    p->lse = beside.lse, p->lengths = beside.lengths;
    return attend_f32(*p, stream);
  }
  const auto& [q_heads, k_heads, v_heads, o_heads, diagonal, gradients] = current->whole;
  const int64_t blind = current->blind, rows = q_heads.rows;
  cudaError_t status = clear(o, o_heads, 0, blind, stream);
  if (status == cudaSuccess && beside.lse && blind) {
    constexpr int kLeast = 0xfe;  // of which the bytes of -1.7e38 are
    status =
        cudaMemset2DAsync(beside.lse, rows * sizeof(float), kLeast, blind * sizeof(float), q_heads.batch * q_heads.heads, stream);
  }
  for (const auto& [first, engine] : current->parts) {
    if (status != cudaSuccess) return status;
    std::vector<const void*> values{static_cast<const char*>(q) + first * q_heads.row_stride * 2, k, v,
                                    static_cast<const char*>(o) + first * o_heads.row_stride * 2};
    if (!are_aligned(values)) return cudaErrorMisalignedAddress;
    if (beside.lse) values.push_back(beside.lse + first);
    if (beside.lengths) values.push_back(beside.lengths);
    status = engine.run(std::move(values), stream);
  }
  return status;
}

cudaError_t AttentionBackwardPlan::differentiate(const void* q, const void* k, const void* v, const void* o, const float* lse,
                                                 const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                                 cudaStream_t stream, const int32_t* lengths) const {
  const auto& current = plans_->on(stream);
  if (!current) return clear(*plans_->gradients, k_gradient, v_gradient, 0, stream);
  if (std::optional<AttentionF32> p = current->f32) {
    const auto read = [](const void* base) { return static_cast<const float*>(base); };
    const auto written = [](const void* base) { return const_cast<float*>(static_cast<const float*>(base)); };
    p->q.base = read(q), p->k.base = read(k), p->v.base = read(v), p->o.base = written(o), p->o_gradient.base = read(o_gradient);
    p->q_gradient.base = written(q_gradient), p->k_gradient.base = written(k_gradient), p->v_gradient.base = written(v_gradient);
    p->lse = const_cast<float*>(lse), p->lengths = lengths;
    return differentiate_f32(*p, stream);
  }
  if (current->parts.empty()) return clear(*plans_->gradients, k_gradient, v_gradient, 0, stream);
  if (const cudaError_t status = clear(*plans_->gradients, k_gradient, v_gradient, current->columns, stream);
      status != cudaSuccess)
    return status;
  std::vector<const void*> values{q, k, v, o, lse, o_gradient, q_gradient, k_gradient, v_gradient};
  if (!are_aligned(values)) return cudaErrorMisalignedAddress;
  if (lengths) values.push_back(lengths);
  return current->parts.front().engine.run(std::move(values), stream);
}

}  // namespace hw
