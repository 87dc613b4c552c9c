#include "hostweave/matmul.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "hostweave/algorithms.h"
#include "hostweave/check.h"
#include "hostweave/device_memory.h"
#include "hostweave/errors.h"
#include "hostweave/few_rows_plan.h"
#include "hostweave/index.h"
#include "hostweave/plan_cache.h"
#include "hostweave/streams.h"
#include "hostweave/threads.h"
#include "matmul_problem.h"

namespace hw {
namespace {

constexpr uint32_t kAlignment = 16;    // alignment in bytes that fast kernels need
constexpr size_t kMostPlans = 4096;    // maximum plans per matmul
constexpr int kMeasured = 16;          // maximum number of recommended algorithms that are measured
constexpr int kTimings = 7;            // timed runs of each algorithm
constexpr float kClearly = 0.98f;      // an algorithm replaces the best so far if its time is at most this share of the best time
constexpr int64_t kScaledStep = 16;    // cuBLASLt multiplies 8-bit floats only if k and n are multiples of this
constexpr int64_t kScaledBlock = 128;  // with block scales: elements of the inner dim per scale
constexpr int64_t kScalesStep = 4;     // with block scales: rows of operand a, and padded rows of scales, are multiples of it
constexpr size_t kColdBytes = size_t{64} << 20;  // larger than the caches of an H200: a memset of this size evicts the operands

cublasLtMatrixLayout_t make_layout(cudaDataType_t dtype, const Matrix& x, int64_t batch_count, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  const int64_t rows = x.row_major() ? x.columns : x.rows;  // cuBLASLt is column-major
  const int64_t columns = x.row_major() ? x.rows : x.columns;
  HW_CHECK(cublasLtMatrixLayoutCreate(&layout, dtype, rows, columns, x.leading_dimension()));
  if (batch_count > 1) {
    const auto count = static_cast<int32_t>(batch_count);
    HW_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    HW_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return layout;
}

size_t size_of(cudaDataType_t dtype) {
  if (dtype == CUDA_R_64F) return 8;
  if (dtype == CUDA_R_32F) return 4;
  if (dtype == CUDA_R_16F || dtype == CUDA_R_16BF) return 2;
  if (dtype == CUDA_R_8F_E4M3 || dtype == CUDA_R_8F_E5M2) return 1;
  throw ExecutionError("matmul: these dtypes are not supported; cast the operands to f16, bf16, f32 or f64");
}

const void* shifted(const void* base, int64_t bytes) { return base ? static_cast<const char*>(base) + bytes : nullptr; }

// Without scales, few-rows kernels are used for at most this number of weights. For more weights, cuBLASLt is as fast (`hostweave
// bench few_rows`).
constexpr int64_t kMostWeights = int64_t{1} << 26;  // elements

// Limits of is_faster_by_blas, as measured on an H200.
constexpr int64_t kManyColumns = int64_t{1} << 14, kFewColumns = 2048, kFewTerms = 2048, kManyTerms = 8192;

// Description of scales in a cuBLASLt mode, for an operand with `rows` rows of `terms` elements.
OperandScales scales_of(int32_t mode, const void* scales, int64_t rows, int64_t terms) {
  const auto* const at = static_cast<const float*>(scales);
  if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return {at, 0, 0, 0};
#if !defined(CUBLAS_VERSION) || CUBLAS_VERSION >= 120900
  if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return {at, 1, rows, 0};
  if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F) {
    const int64_t blocks = terms / kScaledBlock;
    return {at, ceil_div(blocks, kScalesStep) * kScalesStep, 1, OperandScales::kBlockLog2};
  }
#endif
  return {at, 1, 0, 0};
}

// True if cuBLASLt supports this scaled matmul with few rows, and is faster than the few-rows kernels.
bool is_faster_by_blas(const Problem& p, const Scaling& scaling) {
  const int64_t rows = p.a.rows, terms = p.a.columns, columns = p.b.columns;
  const bool of_blocks = scales_of(scaling.a, nullptr, rows, terms).block_step != 0;
  if (terms % kScaledStep != 0 || columns % kScaledStep != 0 || (of_blocks && rows % kScalesStep != 0)) return false;
  if (scaling.a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return rows > kFewRows || terms < kManyTerms;
  return rows > kFewRows && (columns > kManyColumns || terms < kFewTerms || (of_blocks && columns < kFewColumns));
}

// True if the few-rows kernels support these shapes and strides, and cuBLASLt is not faster. Scaled weights need contiguous
// columns.
bool has_few_rows(const Problem& p, const Scaling* scaling) {
  if (scaling ? p.b.row_stride != 1 : p.a.columns * p.b.columns > kMostWeights) return false;
  if (scaling && is_faster_by_blas(p, *scaling)) return false;
  return p.a.rows <= (scaling ? kFewScaledRows : kFewRows) && p.a.columns > 0 && p.batch.count == 1 && p.outer.empty() &&
         p.a.row_major() && p.c.row_major();
}

Activation activation_of(cublasLtEpilogue_t epilogue) {
  if (epilogue & CUBLASLT_EPILOGUE_RELU) return Activation::relu;
  return epilogue & CUBLASLT_EPILOGUE_GELU ? Activation::gelu_tanh : Activation::none;
}

std::string shape_text(const Matrix& x) { return std::to_string(x.rows) + "x" + std::to_string(x.columns); }

}  // namespace

Strided::Strided(std::initializer_list<int64_t> sizes) : shape(sizes), strides(sizes) {
  int64_t step = 1;
  for (int i = shape.ndim - 1; i >= 0; --i) strides.dims[i] = std::exchange(step, step * shape[i]);
}

Algorithms& measured_algorithms() {
  static auto& algorithms = *new Algorithms;  // never destroyed, because plans refer to it until the process ends
  return algorithms;
}

struct MatmulPlan::Plan {
  Problem problem;
  bool swapped = false;                      // computes c' = b' a'
  bool empty = false;                        // c has no elements
  const FewRowsKernels* few_rows = nullptr;  // used instead of cuBLASLt if not null
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t a_layout = nullptr, b_layout = nullptr, c_layout = nullptr;
  bool aligned_only = false;
  cublasLtMatmulAlgo_t recommended{}, unaligned{};
  const cublasLtMatmulAlgo_t* aligned = &recommended;  // algorithm for aligned operands: recommended, or measured
  const void* zeros = nullptr;                         // memory of the zeros that replace both operands if k = 0

  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a_layout, b_layout, c_layout}) {
      if (layout) cublasLtMatrixLayoutDestroy(layout);
    }
    if (description) cublasLtMatmulDescDestroy(description);
  }

  template <class T>
  cublasStatus_t set(cublasLtMatmulDescAttributes_t attribute, const T& value) const {
    return cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof value);
  }

  // Changes a problem with k = 0 to a product of zeros with k = `depth`. Returns the required number of zeros.
  int64_t multiply_zeros(int64_t depth) {
    problem.a = {problem.a.rows, depth, depth, 1};
    problem.b = {depth, problem.b.columns, 1, depth};
    problem.batch.a = problem.batch.b = 0;
    for (Batch& batch : problem.outer) batch.a = batch.b = 0;
    return depth * std::max(problem.a.rows, problem.b.columns);
  }

  // Upper bound of the size of an operand's scales, in bytes.
  size_t most_scales() const {
    const int64_t blocks = problem.a.columns / kScaledBlock + kScalesStep;
    return sizeof(float) * std::max(problem.a.rows, problem.b.columns) * blocks;
  }

  // Largest extent of a batch of matrices, in elements.
  int64_t span() const {
    const Problem& p = problem;
    return std::max({p.a.span() + (p.batch.count - 1) * p.batch.a, p.b.span() + (p.batch.count - 1) * p.batch.b,
                     p.c.span() + (p.batch.count - 1) * p.batch.c});
  }

  // Key of the problem in the table of measured algorithms. `types` includes the epilogue.
  std::string text(std::initializer_list<int> types) const {
    std::string result;
    for (const int type : types) result += std::to_string(type) + " ";
    for (const Matrix& x : {problem.a, problem.b, problem.c}) {
      for (const int64_t size : {x.rows, x.columns, x.row_stride, x.column_stride}) result += std::to_string(size) + " ";
    }
    const Batch& batch = problem.batch;
    for (const int64_t size : {batch.count, batch.a, batch.b, batch.c}) result += std::to_string(size) + " ";
    return result;
  }

  // Returns up to `most` algorithms that cuBLASLt recommends, best first.
  std::vector<cublasLtMatmulAlgo_t> find_algorithms(cublasLtHandle_t blas, uint32_t alignment, int most) const {
    cublasLtMatmulPreference_t preference = nullptr;
    HW_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      HW_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
    // Algorithms that round partial sums (split-k) to the type of the result are not measured.
    if (most > 1) set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    std::vector<cublasLtMatmulHeuristicResult_t> results(most);
    int found = 0;
    // The operands are swapped, because a row-major matrix is the transpose of a column-major matrix.
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(blas, description, b_layout, a_layout, c_layout, c_layout,
                                                                 preference, most, results.data(), &found);
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < found && status == CUBLAS_STATUS_SUCCESS; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(results[i].algo);
    }
    return algorithms;
  }
};

struct MatmulPlan::Plans {
  PlanCache<std::array<Strided, 3>, std::unique_ptr<Plan>> of{kMostPlans};
  std::vector<DeviceMemory> zeros{};  // grows by doubling; older memory is kept, because graphs may still read it
};

MatmulPlan::MatmulPlan(Rank& rank, cudaDataType_t operands, cudaDataType_t result, cublasLtEpilogue_t epilogue,
                       cublasComputeType_t compute)
    : rank_(rank),
      operands_(operands),
      result_(result),
      epilogue_(epilogue),
      compute_(operands == CUDA_R_64F ? CUBLAS_COMPUTE_64F : compute),
      scaling_{operands, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F} {
  size_of(operands);
}

MatmulPlan::MatmulPlan(Rank& rank, cudaDataType_t operand_a, cudaDataType_t result, cublasLtEpilogue_t epilogue, Scaling scaling)
    : MatmulPlan(rank, operand_a, result, epilogue) {
  scaling_ = scaling;
  is_scaled_ = true;
}

void MatmulPlan::prepare(const Strided& a, const Strided& b, const Strided& c) {
  const auto make = [&] {
    std::unique_ptr<Plan> plan(new Plan{simplified(a, b, c)});
    plan->swapped = !last_two_dims(c).row_major();
    plan->empty = std::count(c.shape.dims, c.shape.dims + c.shape.ndim, 0) > 0;
    if (!plan->empty) describe(*plan);
    if (!plan->empty) load_kernels(*plan);
    return plan;
  };
  current_ = plans_->of.find({a, b, c}, make).get();
}

const void* MatmulPlan::zeros(size_t bytes) const {
  std::vector<DeviceMemory>& zeros = plans_->zeros;
  if (zeros.empty() || zeros.back().bytes() < bytes) {
    DeviceMemory memory;
    const size_t size = zeros.empty() ? bytes : std::max(bytes, 2 * zeros.back().bytes());
    const Stream stream = rank_.stream(kLoopStreams, 0);
    HW_CHECK(cudaMemsetAsync(memory.reserve(size), 0, size, stream));
    HW_CHECK(cudaStreamSynchronize(stream));
    zeros.push_back(std::move(memory));
  }
  return zeros.back().data();
}

void MatmulPlan::describe(Plan& plan) const {
  const Problem& p = plan.problem;
  if (p.a.columns == 0) plan.zeros = zeros(plan.multiply_zeros(is_scaled_ ? kScaledStep : 1) * size_of(operands_));
  if (!p.a.valid() || !p.b.valid() || !p.c.valid()) {
    throw ExecutionError("matmul: neither rows nor columns of an operand or result are contiguous; pass a contiguous copy");
  }

  if (epilogue_ != CUBLASLT_EPILOGUE_DEFAULT && (plan.swapped || p.batch.count > 1 || !p.outer.empty())) {
    throw ExecutionError("matmul: a bias or an activation needs one 2-D product whose result has contiguous rows");
  }

  const bool in_f32 = compute_ == CUBLAS_COMPUTE_32F;
  if (in_f32 && !plan.swapped && operands_ == scaling_.operand_b && has_few_rows(p, is_scaled_ ? &scaling_ : nullptr)) {
    plan.few_rows = few_rows_kernels(operands_, result_);
  }
  if (plan.few_rows) return;

  HW_CHECK(cublasLtMatmulDescCreate(&plan.description, compute_, compute_ == CUBLAS_COMPUTE_64F ? CUDA_R_64F : CUDA_R_32F));
  HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.row_major() ? CUBLAS_OP_N : CUBLAS_OP_T));
  HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.row_major() ? CUBLAS_OP_N : CUBLAS_OP_T));
  HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_));
  if (is_scaled_) describe_scales(plan);
  plan.a_layout = make_layout(operands_, p.a, p.batch.count, p.batch.a);
  plan.b_layout = make_layout(scaling_.operand_b, p.b, p.batch.count, p.batch.b);
  plan.c_layout = make_layout(result_, p.c, p.batch.count, p.batch.c);
  const auto find = [&](uint32_t alignment, int most) {
    // cuBLASLt uses only the alignment of this address.
    const void* const bias = reinterpret_cast<const void*>(uintptr_t{alignment});
    if (has_bias()) HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
    return plan.find_algorithms(rank_.blas(), alignment, most);
  };
  const std::vector<cublasLtMatmulAlgo_t> found = find(kAlignment, rank_.measures() ? kMeasured : 1);
  if (found.empty()) {
    throw ExecutionError("matmul: cuBLASLt has no algorithm for " + shape_text(p.a) + " times " + shape_text(p.b) +
                         (is_scaled_ ? " of 8-bit floats with these scales" : "") +
                         (epilogue_ == CUBLASLT_EPILOGUE_DEFAULT ? "" : " with a bias or an activation"));
  }
  plan.recommended = found.front();
  if (found.size() > 1) {
    const auto measure = [&] { return fastest(plan, found); };
    plan.aligned = measured_algorithms().find(
        plan.text({operands_, scaling_.operand_b, result_, epilogue_, compute_, scaling_.a, scaling_.b}), measure);
  }
  const std::vector<cublasLtMatmulAlgo_t> unaligned = find(size_of(operands_), 1);
  plan.aligned_only = unaligned.empty();
  if (!plan.aligned_only) plan.unaligned = unaligned.front();
}

void MatmulPlan::describe_scales(Plan& plan) const {
  const Problem& p = plan.problem;
  if (p.batch.count > 1 || !p.outer.empty() || plan.swapped) {
    throw ExecutionError("matmul: scales need one 2-D product whose result has contiguous rows");
  }
  if (p.a.columns % kScaledStep != 0 || p.b.columns % kScaledStep != 0) {
    throw ExecutionError("scaled matmul: " + shape_text(p.a) + " times " + shape_text(p.b) +
                         ": cuBLASLt multiplies 8-bit floats only if the inner dim and the columns are multiples of " +
                         std::to_string(kScaledStep) +
                         "; pad them, or declare these dims as ints, so that the product is composed of other ops");
  }
#if !defined(CUBLAS_VERSION) || CUBLAS_VERSION >= 120800
  if (!plan.zeros) {
    HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scaling_.b));  // The operands are swapped.
    HW_CHECK(plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scaling_.a));
  }
#endif
  // cuBLASLt uses only the alignment of this address.
  const void* const any = reinterpret_cast<const void*>(uintptr_t{kAlignment});
  HW_CHECK(set_scales(plan, {.scale_a = any, .scale_b = any}));
}

cublasStatus_t MatmulPlan::set_scales(const Plan& plan, const Epilogue& epilogue) const {
  const void* const of_a = plan.zeros ? plan.zeros : epilogue.scale_a;
  const void* const of_b = plan.zeros ? plan.zeros : epilogue.scale_b;
  const cublasStatus_t status = plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_b);
  return status == CUBLAS_STATUS_SUCCESS ? plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_a) : status;
}

// Selects an algorithm by its median time with cold caches. A later algorithm must be clearly faster (kClearly).
cublasLtMatmulAlgo_t MatmulPlan::fastest(Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& algorithms) const {
  const Stream stream = rank_.stream(kLoopStreams, 0);
  HW_CHECK(cudaDeviceSynchronize());
  DeviceMemory memory, other, scales;
  const void* const scale = is_scaled_ ? scales.reserve(plan.most_scales()) : nullptr;
  void* const scratch = memory.reserve(plan.span() * std::max(size_of(operands_), size_of(result_)));
  HW_CHECK(cudaMemsetAsync(scratch, 0, memory.bytes(), stream));
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  float least = 0;
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
    plan.aligned = &algorithm;
    std::array<float, kTimings> times;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = -1; i < kTimings && status == CUBLAS_STATUS_SUCCESS; ++i) {  // The first run loads kernels, and does not count.
      HW_CHECK(cudaMemsetAsync(other.reserve(kColdBytes), 0, kColdBytes, stream));
      HW_CHECK(cudaEventRecord(begin, stream));
      const void* const bias = has_bias() ? scratch : nullptr;
      status = one_batch(plan, scratch, scratch, scratch, stream, {.bias = bias, .scale_a = scale, .scale_b = scale});
      HW_CHECK(cudaEventRecord(end, stream));
      HW_CHECK(cudaEventSynchronize(end));
      HW_CHECK(cudaEventElapsedTime(&times[std::max(i, 0)], begin, end));
    }
    std::ranges::nth_element(times, times.begin() + kTimings / 2);
    if (status != CUBLAS_STATUS_SUCCESS || (least != 0 && times[kTimings / 2] > kClearly * least)) continue;
    least = times[kTimings / 2];
    plan.recommended = algorithm;
  }
  plan.aligned = &plan.recommended;
  return plan.recommended;
}

// With lazy loading, CUDA's default, a kernel is loaded at its first launch. Loading takes milliseconds, and can deadlock with a
// waiting NCCL kernel. So this function runs every cuBLASLt kernel of the plan on scratch memory, also with `accumulate`, while
// the device is idle.
void MatmulPlan::load_kernels([[maybe_unused]] const Plan& plan) const {
#ifndef HOSTWEAVE_CPU_DEVICE
  if (plan.few_rows) {
    HW_CHECK(plan.few_rows->load());
    return;
  }
  const size_t size = std::max(size_of(operands_), size_of(result_));
  const Stream stream = rank_.stream(kLoopStreams, 0);
  HW_CHECK(cudaDeviceSynchronize());
  DeviceMemory memory, scales;
  const void* const scale = is_scaled_ ? scales.reserve(plan.most_scales()) : nullptr;
  auto* const scratch = static_cast<char*>(memory.reserve((plan.span() + 1) * size));
  const auto run_at = [&](char* memory) {
    const void* const bias = has_bias() ? memory : nullptr;
    Epilogue end{.bias = bias, .scale_a = scale, .scale_b = scale};
    const cublasStatus_t status = one_batch(plan, memory, memory, memory, stream, end);
    end.accumulate = memory;
    return status ? status : one_batch(plan, memory, memory, memory, stream, end);
  };
  cublasStatus_t status = run_at(scratch);
  if (status == CUBLAS_STATUS_SUCCESS && !plan.aligned_only) status = run_at(scratch + size);
  const cudaError_t finished = cudaStreamSynchronize(stream);
  HW_CHECK(status);
  HW_CHECK(finished);
#endif
}

cublasStatus_t MatmulPlan::multiply(const void* a, const void* b, void* c, Stream stream, const Epilogue& epilogue) const {
  const Plan& plan = *current_;
  if (plan.empty) return CUBLAS_STATUS_SUCCESS;
  if (plan.swapped) std::swap(a, b);
  if (plan.zeros) a = b = plan.zeros;
  const size_t outer = plan.problem.outer.size();
  return outer == 0 ? one_batch(plan, a, b, c, stream, epilogue) : each_batch(outer, a, b, c, stream, epilogue);
}

// Enqueues one strided-batched matmul for each index of the first `dims` outer dims.
cublasStatus_t MatmulPlan::each_batch(size_t dims, const void* a, const void* b, void* c, Stream stream,
                                      Epilogue epilogue) const {
  if (dims == 0) return one_batch(*current_, a, b, c, stream, epilogue);
  const Batch& batch = current_->problem.outer[dims - 1];
  const auto operand_size = static_cast<int64_t>(size_of(operands_)), result_size = static_cast<int64_t>(size_of(result_));
  for (int64_t i = 0; i < batch.count; ++i) {
    const cublasStatus_t status = each_batch(dims - 1, a, b, c, stream, epilogue);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    a = shifted(a, batch.a * operand_size);
    b = shifted(b, batch.b * operand_size);
    c = static_cast<char*>(c) + batch.c * result_size;
    epilogue.accumulate = shifted(epilogue.accumulate, batch.c * result_size);
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t MatmulPlan::one_batch(const Plan& plan, const void* a, const void* b, void* c, Stream stream,
                                     const Epilogue& epilogue) const {
  const double scale = epilogue.scale;
  const void *const accumulate = epilogue.accumulate, *const bias = epilogue.bias;
  if (plan.few_rows) {
    const Matrix &x = plan.problem.a, &weights = plan.problem.b, &result = plan.problem.c;
    const bool transposed = !weights.row_major();
    const int64_t pitch = transposed ? weights.column_stride : weights.row_stride;
    const FewRows<void, 1> operands{x.rows, x.columns, weights.columns, a, x.row_stride, {b}, pitch};
    const ProductEnd<void> end{c, result.row_stride, static_cast<float>(scale), accumulate, bias, activation_of(epilogue_)};
    const ProductScales scales{scales_of(scaling_.a, epilogue.scale_a, x.rows, x.columns),
                               scales_of(scaling_.b, epilogue.scale_b, weights.columns, weights.rows)};
    const bool launched = plan.few_rows->multiply({operands, end, transposed, scales}, stream) == cudaSuccess;
    return launched ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const double scales[] = {scale, accumulate ? 1.0 : 0.0};  // alpha and beta
  const float float_scales[] = {static_cast<float>(scale), accumulate ? 1.0f : 0.0f};
  const bool in_double = compute_ == CUBLAS_COMPUTE_64F;
  const void* alpha = in_double ? static_cast<const void*>(scales) : float_scales;
  const void* beta = in_double ? static_cast<const void*>(scales + 1) : float_scales + 1;
  uintptr_t address = 0;
  for (const void* operand : {a, b, static_cast<const void*>(c), accumulate, bias})
    address |= reinterpret_cast<uintptr_t>(operand);
  const bool aligned = address % kAlignment == 0;
  if (!aligned && plan.aligned_only) [[unlikely]]
    throw ExecutionError("cuBLASLt multiplies 8-bit floats only at addresses that are multiples of " +
                         std::to_string(kAlignment) + " bytes; slice operands and results at such multiples");
  if (has_bias()) {  // The bias pointer is a part of the description.
    const cublasStatus_t status = plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  if (is_scaled_) {
    const cublasStatus_t status = set_scales(plan, epilogue);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return cublasLtMatmul(rank_.blas(), plan.description, alpha, b, plan.b_layout, a, plan.a_layout, beta,
                        accumulate ? accumulate : c, plan.c_layout, c, plan.c_layout, aligned ? plan.aligned : &plan.unaligned,
                        stream.workspace, kWorkspaceBytes, stream);
}

}  // namespace hw
