// cuDNN's attention, by the graph of its ops: cuDNN knows the pattern, and has one kernel for it.
#include <cudnn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "hostweave/attention.h"
#include "hostweave/check.h"
#include "hostweave/errors.h"

namespace hw {
namespace {

constexpr int64_t kAlignment = 16;  // of what the kernels read and write

void expect(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char reason[512] = "";
  cudnnGetLastErrorString(reason, sizeof reason);
  throw ExecutionError(std::string("attention: cuDNN: ") + what + ": " + cudnnGetErrorString(status) + " " + reason);
}

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

// A descriptor of cuDNN's backend.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) { expect(cudnnBackendCreateDescriptor(type, &handle_), "a descriptor"); }
  ~Descriptor() { cudnnBackendDestroyDescriptor(handle_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  operator cudnnBackendDescriptor_t() const { return handle_; }

  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const void* values, int64_t count = 1) {
    expect(cudnnBackendSetAttribute(handle_, name, type, count, values), "an attribute");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &value.handle_);
  }
  Descriptor& finish(const char* what) {
    expect(cudnnBackendFinalize(handle_), what);
    return *this;
  }

 private:
  cudnnBackendDescriptor_t handle_ = nullptr;
};

using Dims = std::array<int64_t, 4>;
using Number = std::variant<float, int32_t>;

struct Tensor {
  const Descriptor* descriptor = nullptr;
  Dims dims{};

  explicit operator bool() const { return descriptor != nullptr; }
};

Dims row_major(const Dims& dims) { return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}; }
Dims dims_of(const Heads& x) { return {x.batch, x.heads, x.rows, x.size}; }
Dims strides_of(const Heads& x) { return {x.batch_stride, x.head_stride, x.row_stride, 1}; }
Dims turned(const Dims& x) { return {x[0], x[1], x[3], x[2]}; }

// A graph of ops on tensors, which have numbers. Those from 1 on are the caller's.
class Graph {
 public:
  Tensor tensor(int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides) {
    return make(number, type, dims, strides, false, false);
  }
  // What an op gives that others take: it is never in memory.
  Tensor between(cudnnDataType_t type, const Dims& dims) { return make(next_++, type, dims, row_major(dims), true, false); }
  Tensor number(Number value) {
    numbers_.emplace(next_, value);
    const Dims one{1, 1, 1, 1};
    return make(next_++, std::holds_alternative<float>(value) ? CUDNN_DATA_FLOAT : CUDNN_DATA_INT32, one, one, false, true);
  }

  void matmul(const Tensor& a, const Tensor& b, const Tensor& c) {
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    const cudnnDataType_t in_float = CUDNN_DATA_FLOAT;
    how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &in_float).finish("a product");
    op(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how)
        .finish("a product");
  }

  // y = x op b, of as many operands as the mode takes; where t is true x, else b.
  Tensor pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t type, const Tensor& x, const Tensor& b = {}, const Tensor& t = {},
                   cudnnDataType_t math = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    const Tensor y = between(type, x.dims);
    pointwise_to(y, mode, x, b, t, math, axis);
    return y;
  }
  void pointwise_to(const Tensor& y, cudnnPointwiseMode_t mode, const Tensor& x, const Tensor& b = {}, const Tensor& t = {},
                    cudnnDataType_t math = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
    how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &math);
    if (axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &axis);
    how.finish("a pointwise op");
    Descriptor& made = op(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
    if (b) made.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b.descriptor);
    if (t) made.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *t.descriptor);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor).finish("a pointwise op");
  }

  // Of each row one.
  Tensor reduce(cudnnReduceTensorOp_t kind, const Tensor& x) {
    const Tensor y = between(CUDNN_DATA_FLOAT, {x.dims[0], x.dims[1], x.dims[2], 1});
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    const cudnnDataType_t in_float = CUDNN_DATA_FLOAT;
    how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &kind);
    how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &in_float).finish("a reduction");
    op(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)
        .finish("a reduction");
    return y;
  }

  const std::vector<cudnnBackendDescriptor_t>& ops() const { return ops_; }
  const std::map<int64_t, Number>& numbers() const { return numbers_; }

 private:
  Tensor make(int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides, bool is_virtual, bool by_value) {
    Descriptor& made = descriptors_.emplace_back(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &number);
    made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
    made.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), dims.size());
    made.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), strides.size());
    made.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &kAlignment);
    made.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &is_virtual);
    made.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, &by_value);
    made.finish("a tensor");
    return {&made, dims};
  }
  Descriptor& op(cudnnBackendDescriptorType_t type) {
    Descriptor& made = descriptors_.emplace_back(type);
    ops_.push_back(made);
    return made;
  }

  std::list<Descriptor> descriptors_;
  std::vector<cudnnBackendDescriptor_t> ops_;
  std::map<int64_t, Number> numbers_;
  int64_t next_ = 16;
};

enum Operand : int64_t { kQ = 1, kK, kV, kO, kLse };

// Scores where a row sees the column, else -inf. The pattern is the one that cuDNN looks for.
Tensor seen(Graph& graph, const Tensor& scores, cudnnPointwiseMode_t comparison, bool of_rows, const std::vector<Number>& added) {
  const Tensor row = graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, scores, {}, {}, CUDNN_DATA_FLOAT, 2);
  const Tensor column = graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, scores, {}, {}, CUDNN_DATA_FLOAT, 3);
  Tensor left = of_rows ? row : column;
  cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD;  // the first number, and the second one subtracted
  for (const Number& number : added) {
    const cudnnDataType_t type = std::holds_alternative<float>(number) ? CUDNN_DATA_FLOAT : CUDNN_DATA_INT32;
    left = graph.pointwise(mode, type, left, graph.number(number), {}, type, 3);
    mode = CUDNN_POINTWISE_SUB;
  }
  const Tensor sees = graph.pointwise(comparison, CUDNN_DATA_BOOLEAN, left, of_rows ? column : row, {}, CUDNN_DATA_BOOLEAN);
  return graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, graph.number(-INFINITY), sees);
}

void build(Graph& graph, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options) {
  Heads k = problem.k, v = problem.v;
  const int64_t rows = problem.q.rows, diagonal = problem.diagonal;
  if (options.causal) k.rows = v.rows = std::min(k.rows, rows + diagonal);  // no row sees more
  const Tensor q = graph.tensor(kQ, type, dims_of(problem.q), strides_of(problem.q));
  const Tensor k_turned = graph.tensor(kK, type, turned(dims_of(k)), turned(strides_of(k)));
  const Dims dims{problem.q.batch, problem.q.heads, rows, k.rows};
  const Tensor products = graph.between(CUDNN_DATA_FLOAT, dims);
  graph.matmul(q, k_turned, products);
  Tensor scores =
      graph.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, products, graph.number(static_cast<float>(options.scale)));
  if (options.causal && rows > 1) {  // one row sees all that is left
    const auto end = static_cast<int32_t>(rows + diagonal), begin = static_cast<int32_t>(rows);
    const std::vector<Number> shift = diagonal ? std::vector<Number>{end, begin} : std::vector<Number>{};
    scores = seen(graph, scores, CUDNN_POINTWISE_CMP_GE, true, shift);
  }
  if (options.window) {
    scores = seen(graph, scores, CUDNN_POINTWISE_CMP_GT, false, {static_cast<float>(options.window - diagonal)});
  }
  const Tensor largest = graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores);
  const Tensor distances = graph.pointwise(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, scores, largest);
  const Tensor powers = graph.pointwise(CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT, distances);
  const Tensor sums = graph.reduce(CUDNN_REDUCE_TENSOR_ADD, powers);
  const Tensor logarithms = graph.pointwise(CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sums);
  const Dims of_rows{dims[0], dims[1], rows, 1};
  const Tensor lse = options.has_lse ? graph.tensor(kLse, CUDNN_DATA_FLOAT, of_rows, row_major(of_rows))
                                     : graph.between(CUDNN_DATA_FLOAT, of_rows);  // of the pattern, wanted or not
  graph.pointwise_to(lse, CUDNN_POINTWISE_ADD, largest, logarithms);
  const Tensor weights = graph.pointwise(CUDNN_POINTWISE_DIV, type, powers, sums);
  graph.matmul(weights, graph.tensor(kV, type, dims_of(v), strides_of(v)),
               graph.tensor(kO, type, dims_of(problem.o), strides_of(problem.o)));
}

}  // namespace

struct AttentionPlan::Plan {
  cudnnHandle_t handle;
  std::vector<int64_t> names;  // of what a call passes: the operands, and numbers
  std::map<int64_t, Number> numbers;
  std::unique_ptr<Descriptor> plan;
  void* workspace = nullptr;

  Plan(cudnnHandle_t handle, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options)
      : handle(handle) {
    Graph graph;
    build(graph, problem, type, options);
    names = {kQ, kK, kV, kO};
    if (options.has_lse) names.push_back(kLse);
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
    if (bytes > 0) HW_CHECK(cudaMalloc(&workspace, bytes));
  }
  ~Plan() {
    if (workspace) cudaFree(workspace);
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
    }
    expect(status, "it has no kernel for these shapes on this GPU; f32 is computed without it: cast the operands");
  }

  // On the operands, and lse where it is wanted.
  void run(std::vector<const void*> values, cudaStream_t stream) const {
    for (const auto& [name, number] : numbers) {
      values.push_back(std::visit([](const auto& value) { return static_cast<const void*>(&value); }, number));
    }
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const auto count = static_cast<int64_t>(values.size());
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, names.data(), count);
    pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, values.data(), count);
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace).finish("the arguments of attention");
    expect(cudnnSetStream(handle, stream), "cudnnSetStream");
    expect(cudnnBackendExecute(handle, *plan, pack), "attention");
  }

  // Loads the kernels, as MatmulPlan::load_kernels does, and why: it runs once on memory that nobody looks at.
  void load_kernels(const AttentionProblem& problem, cudaStream_t stream) const {
    int64_t elements = problem.q.batch * problem.q.heads * problem.q.rows * 2;  // of lse, in halves
    for (const Heads& x : {problem.q, problem.k, problem.v, problem.o}) {
      const int64_t last = (x.batch - 1) * x.batch_stride + (x.heads - 1) * x.head_stride + (x.rows - 1) * x.row_stride;
      elements = std::max(elements, last + x.size);
    }
    void* scratch = nullptr;
    HW_CHECK(cudaMalloc(&scratch, elements * 2));
    const std::shared_ptr<void> freed(scratch, cudaFree);
    run(std::vector<const void*>(names.size() - numbers.size(), scratch), stream);
    HW_CHECK(cudaStreamSynchronize(stream));
  }

  static constexpr int kMostEngines = 8;
};

std::shared_ptr<const AttentionPlan::Plan> AttentionPlan::plan(const AttentionProblem& problem) const {
  for (const Heads& x : {problem.q, problem.k, problem.v, problem.o}) {
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

cudaError_t AttentionPlan::attend(const void* q, const void* k, const void* v, void* o, cudaStream_t stream, float* lse) const {
  if (!current_) return cudaSuccess;
  std::vector<const void*> values{q, k, v, o};
  if (lse) values.push_back(lse);
  for (const void* operand : values) {
    if (reinterpret_cast<uintptr_t>(operand) % kAlignment) return cudaErrorMisalignedAddress;
  }
  current_->run(std::move(values), stream);
  return cudaSuccess;
}

}  // namespace hw
