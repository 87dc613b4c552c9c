// cuBLASLt: descriptors, and the matmul as an op. A call of cublasLtMatmul reads descriptors and host scalars before it returns.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <string>
#include <thread>

#include "errors.h"
#include "gemm.h"
#include "machine.h"

using namespace hostweave::cpu;

namespace {

std::atomic<std::uint64_t> live_matmuls = 0;

constexpr int kMostAlgorithms = 8;
// For tests of tuning: each algorithm takes this much longer than the next.
constexpr auto kSlowness = std::chrono::milliseconds(10);
std::atomic<int> algorithms = 1;
std::array<std::atomic<std::uint64_t>, kMostAlgorithms> runs;

struct Desc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  std::int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  std::int32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  void *scale_a = nullptr, *scale_b = nullptr;
  std::int32_t mode_a = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
};

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows, cols;
  std::int64_t ld;
  std::int32_t batch_count = 1;
  std::int64_t batch_stride = 0;

  Operand operand(const void* base) const { return {type, ld, const_cast<void*>(base)}; }
};

Desc* content(cublasLtMatmulDesc_t desc) { return reinterpret_cast<Desc*>(desc); }
Layout* content(cublasLtMatrixLayout_t layout) { return reinterpret_cast<Layout*>(layout); }

// An attribute of a descriptor, with its storage.
struct Field {
  template <class T>
  Field(int attribute, T& value) : attribute(attribute), value(&value), bytes(sizeof value) {}
  int attribute;
  void* value;
  std::size_t bytes;
};

cublasStatus_t set(std::initializer_list<Field> fields, int attribute, const void* value, std::size_t bytes,
                   const std::string& call) {
  const auto* const field = std::ranges::find(fields, attribute, &Field::attribute);
  if (field == fields.end()) return blas_not_supported(call + ": attribute " + std::to_string(attribute));
  if (!value || bytes != field->bytes) {
    return error(CUBLAS_STATUS_INVALID_VALUE,
                 call + ": " + std::to_string(bytes) + " bytes for an attribute of " + std::to_string(field->bytes));
  }
  std::memcpy(field->value, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t invalid(const std::string& what) { return error(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmul: " + what); }

constexpr cublasLtEpilogue_t kEpilogues[] = {CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS,
                                             CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS};

constexpr cublasLtMatmulMatrixScale_t kScaleModes[] = {
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};

std::string shape(const Layout& layout) { return std::to_string(layout.rows) + "x" + std::to_string(layout.cols); }

bool is_8_bit(const Layout& layout) { return layout.type == CUDA_R_8F_E4M3 || layout.type == CUDA_R_8F_E5M2; }

// Returns why a matmul of 8-bit floats is not supported, or null. The rules are those of cuBLASLt on Hopper, except for `few`.
const char* why_not_scaled(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  const auto of_blocks = [](std::int32_t mode) {
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  };
  if (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) return "of E5M2 by E5M2";
  if (desc.transpose_a == CUBLAS_OP_N || desc.transpose_b != CUBLAS_OP_N) return "of 8-bit floats that are not TN";
  if (desc.mode_a != desc.mode_b && !(of_blocks(desc.mode_a) && of_blocks(desc.mode_b))) return "with these two scale modes";
  if (a.rows % 16 != 0 || a.cols % 16 != 0 || a.ld % 16 != 0 || b.ld % 16 != 0)
    return "of 8-bit floats with sizes that 16 does not divide";
  // True for matmuls that few-rows kernels of the runtime can compute instead of cuBLASLt (hw::kFewScaledRows).
  const bool few = b.cols <= 16 && a.type == CUDA_R_8F_E4M3 && b.type == CUDA_R_8F_E4M3;
  if (desc.mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F && b.cols % 4 != 0 && !few)
    return "with block scales, and a number of rows that 4 does not divide";
  if (desc.epilogue & CUBLASLT_EPILOGUE_BIAS && d.type == CUDA_R_32F) return "of 8-bit floats with a bias of f32";
  return a.batch_count > 1 ? "of batches of 8-bit floats" : nullptr;
}

// Validates types, shapes and layouts, for the heuristic and the matmul.
cublasStatus_t check(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const auto narrow = [](const Layout& l) { return l.type == CUDA_R_16F || l.type == CUDA_R_16BF || l.type == CUDA_R_32F; };
  const bool all_double = a.type == CUDA_R_64F && b.type == CUDA_R_64F && c.type == CUDA_R_64F && d.type == CUDA_R_64F;
  const bool scaled = is_8_bit(a) && is_8_bit(b) && narrow(c) && c.type == d.type;
  const bool all_narrow = narrow(a) && narrow(b) && narrow(c) && narrow(d);
  if (scaled) {
    if (const char* const why = why_not_scaled(desc, a, b, d)) return blas_not_supported(std::string("cublasLtMatmul ") + why);
  } else if (!all_double && !all_narrow)
    return blas_not_supported("cublasLtMatmul of these types");
  if ((desc.compute == CUBLAS_COMPUTE_64F) != all_double) return blas_not_supported("cublasLtMatmul with this compute type");
  if (desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && (a.type != CUDA_R_32F || b.type != CUDA_R_32F)) {
    return blas_not_supported("cublasLtMatmul in TF32 of types that are not f32");
  }
  if (desc.scale != (all_double ? CUDA_R_64F : CUDA_R_32F)) return blas_not_supported("cublasLtMatmul with this scale type");
  for (const Layout* layout : {&a, &b, &c, &d}) {
    const auto rows = static_cast<std::int64_t>(layout->rows), cols = static_cast<std::int64_t>(layout->cols);
    if (layout->ld < rows) return invalid("a leading dimension smaller than the number of rows");
    if (std::max({rows, cols, layout->ld}) > INT_MAX) return blas_not_supported("a dimension of 2^31 or more");
  }
  const bool ta = desc.transpose_a != CUBLAS_OP_N, tb = desc.transpose_b != CUBLAS_OP_N;
  const auto m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols, n = tb ? b.rows : b.cols;
  if ((tb ? b.cols : b.rows) != k || d.rows != m || d.cols != n || c.rows != m || c.cols != n) {
    return invalid("shapes do not match: A " + shape(a) + (ta ? " transposed" : "") + ", B " + shape(b) +
                   (tb ? " transposed" : "") + ", C " + shape(c) + ", D " + shape(d));
  }
  for (const Layout* layout : {&b, &c, &d}) {
    if (layout->batch_count != a.batch_count) return invalid("batch counts differ");
  }
  return CUBLAS_STATUS_SUCCESS;
}

void add_ranges(Ranges& ranges, const void* base, const Layout& layout, bool write) {
  const std::size_t size = type_size(layout.type);
  const std::size_t bytes = layout.rows * size, pitch = layout.ld * size;
  const std::int64_t batches = layout.batch_stride == 0 ? 1 : layout.batch_count;
  for (std::int64_t i = 0; i < batches; ++i) {
    const void* const at = shift(base, i * layout.batch_stride, layout.type);
    ranges.push_back(write ? write_of(at, bytes, layout.cols, pitch) : read_of(at, bytes, layout.cols, pitch));
  }
}

}  // namespace

extern "C" {

uint64_t hw_cpu_live_matmuls(void) { return live_matmuls; }

void hw_cpu_set_algorithms(int count) {
  algorithms = std::clamp(count, 1, kMostAlgorithms);
  for (auto& each : runs) each = 0;
}
uint64_t hw_cpu_runs_of_algorithm(int algorithm) { return runs.at(algorithm); }

size_t cublasLtGetVersion(void) { return 0; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  Call call;
  if (Machine::get().fault("cublasLtCreate")) return error(CUBLAS_STATUS_ALLOC_FAILED, "cublasLtCreate: made to fail");
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(this_thread().device));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Desc{compute, scale});
  ++live_matmuls;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete content(desc);
  --live_matmuls;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  Desc changed = *content(handle);
  const cublasStatus_t status = set({{CUBLASLT_MATMUL_DESC_TRANSA, changed.transpose_a},
                                     {CUBLASLT_MATMUL_DESC_TRANSB, changed.transpose_b},
                                     {CUBLASLT_MATMUL_DESC_EPILOGUE, changed.epilogue},
                                     {CUBLASLT_MATMUL_DESC_BIAS_POINTER, changed.bias},
                                     {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, changed.scale_a},
                                     {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, changed.scale_b},
                                     {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, changed.mode_a},
                                     {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, changed.mode_b}},
                                    attribute, value, bytes, "cublasLtMatmulDescSetAttribute");
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  for (const int op : {changed.transpose_a, changed.transpose_b}) {
    if (op != CUBLAS_OP_N && op != CUBLAS_OP_T && op != CUBLAS_OP_C)
      return error(CUBLAS_STATUS_INVALID_VALUE, "an unknown transpose");
  }
  for (const int mode : {changed.mode_a, changed.mode_b}) {
    if (std::ranges::count(kScaleModes, mode) == 0) return blas_not_supported("scale mode " + std::to_string(mode));
  }
  if (std::ranges::count(kEpilogues, changed.epilogue) == 0)
    return blas_not_supported("epilogue " + std::to_string(changed.epilogue));
  *content(handle) = changed;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete content(layout);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  Layout& layout = *content(handle);
  return set({{CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, layout.batch_count},
              {CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout.batch_stride}},
             attribute, value, bytes, "cublasLtMatrixLayoutSetAttribute");
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<char*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  // Preferences only restrict the choice of algorithms, so they have no effect here.
  std::uint64_t wide;
  std::uint32_t narrow;
  return set({{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, wide},
              {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, narrow},
              {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, narrow},
              {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, narrow},
              {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, narrow},
              {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, narrow}},
             attribute, value, bytes, "cublasLtMatmulPreferenceSetAttribute");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  *found = 0;
  if (requested < 1) return invalid("no algorithm was requested");
  const cublasStatus_t status = check(*content(desc), *content(a), *content(b), *content(c), *content(d));
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  *found = std::min<int>(requested, algorithms);
  for (int i = 0; i < *found; ++i) {
    results[i] = {};
    results[i].algo.data[0] = i;
    results[i].state = CUBLAS_STATUS_SUCCESS;
    results[i].wavesCount = 1;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc_handle, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_handle, const void* b, cublasLtMatrixLayout_t b_handle, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_handle, void* d, cublasLtMatrixLayout_t d_handle,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  if (!handle) return error(CUBLAS_STATUS_NOT_INITIALIZED, "cublasLtMatmul: no handle");
  if (!desc_handle || !a_handle || !b_handle || !c_handle || !d_handle || !alpha || !beta) return invalid("a null argument");
  const Desc& desc = *content(desc_handle);
  const Layout &la = *content(a_handle), &lb = *content(b_handle), &lc = *content(c_handle), &ld = *content(d_handle);
  const cublasStatus_t status = check(desc, la, lb, lc, ld);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Gemm g;
  g.transpose_a = desc.transpose_a != CUBLAS_OP_N;
  g.transpose_b = desc.transpose_b != CUBLAS_OP_N;
  g.m = static_cast<std::int64_t>(ld.rows), g.n = static_cast<std::int64_t>(ld.cols);
  g.k = static_cast<std::int64_t>(g.transpose_a ? la.rows : la.cols);
  if (desc.epilogue & CUBLASLT_EPILOGUE_RELU) g.activation = Gemm::Activation::relu;
  if (desc.epilogue & CUBLASLT_EPILOGUE_GELU) g.activation = Gemm::Activation::gelu;
  const bool wide = desc.scale == CUDA_R_64F;
  g.alpha = wide ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha);
  g.beta = wide ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
  const bool has_bias = desc.epilogue & CUBLASLT_EPILOGUE_BIAS;
  if (has_bias && !desc.bias) return invalid("an epilogue with bias, without a bias pointer");
  if (has_bias) g.bias = desc.bias;
  g.a = la.operand(a), g.b = lb.operand(b), g.c = lc.operand(g.beta != 0 ? c : nullptr), g.d = ld.operand(d);

  const bool scaled = is_8_bit(la);
  if (scaled) {
    if (!desc.scale_a || !desc.scale_b) return invalid("8-bit floats without scales");
    g.scales_a = {static_cast<const float*>(desc.scale_a), desc.mode_a, g.m, g.k};
    g.scales_b = {static_cast<const float*>(desc.scale_b), desc.mode_b, g.n, g.k};
  }

  OpPtr op = new_op("matmul", 8);
  for (const Scales& scales : {g.scales_a, g.scales_b}) {
    if (scaled) op->ranges.push_back(read_of(scales.at, scales.count() * sizeof(float)));
  }
  add_ranges(op->ranges, a, la, false);
  add_ranges(op->ranges, b, lb, false);
  if (g.beta != 0) add_ranges(op->ranges, c, lc, false);
  add_ranges(op->ranges, d, ld, true);
  if (has_bias) op->ranges.push_back(read_of(desc.bias, ld.rows * type_size(ld.type)));
  // cuBLASLt may use the whole workspace. So concurrent matmuls must not share a workspace.
  if (workspace && workspace_bytes != 0) op->ranges.push_back(scratch_of(workspace, workspace_bytes));
  const int chosen = algorithm ? static_cast<int>(algorithm->data[0] % kMostAlgorithms) : 0;
  op->work = [g, la, lb, lc, ld, chosen] {
    ++runs[chosen];
    if (chosen + 1 < algorithms) std::this_thread::sleep_for((algorithms - 1 - chosen) * kSlowness);
    for (std::int64_t i = 0; i < ld.batch_count; ++i) {
      Gemm one = g;
      one.a = g.a.from(i * la.batch_stride);
      one.b = g.b.from(i * lb.batch_stride);
      one.c = g.c.from(i * lc.batch_stride);
      one.d = g.d.from(i * ld.batch_stride);
      run(one);
    }
  };

  Call call;
  if (Machine::get().failed()) return blas_stopped();
  if (submit(call.lock, std::move(op), stream) == cudaSuccess) return CUBLAS_STATUS_SUCCESS;
  if (Machine::get().failed()) return blas_stopped();
  return error(CUBLAS_STATUS_INVALID_VALUE, last_error_text());
}

}  // extern "C"
