// cublasLtMatmul against a plain loop: types, transposes, batches, alpha and beta, epilogues, edges.
#include <cmath>

#include "testing.h"

using namespace testing;

namespace {

struct Layout {
  Layout(cudaDataType type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld, int batches = 1, std::int64_t stride = 0) {
    OK(cublasLtMatrixLayoutCreate(&handle, type, rows, cols, ld));
    const std::int32_t b = batches;
    OK(cublasLtMatrixLayoutSetAttribute(handle, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &b, sizeof b));
    OK(cublasLtMatrixLayoutSetAttribute(handle, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(handle); }
  operator cublasLtMatrixLayout_t() const { return handle; }
  cublasLtMatrixLayout_t handle;
};

struct Desc {
  Desc(cublasComputeType_t compute, cudaDataType_t scale) { OK(cublasLtMatmulDescCreate(&handle, compute, scale)); }
  ~Desc() { cublasLtMatmulDescDestroy(handle); }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    OK(cublasLtMatmulDescSetAttribute(handle, attribute, &value, sizeof value));
  }
  operator cublasLtMatmulDesc_t() const { return handle; }
  cublasLtMatmulDesc_t handle;
};

struct Case {
  int m = 5, n = 7, k = 3;
  bool ta = false, tb = false;
  int batches = 1;
  bool share_b = false;  // batch stride 0
  double alpha = 1, beta = 0;
  bool other_c = false;
  int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  int padding = 0;
};

struct Handle {
  Handle() { OK(cublasLtCreate(&handle)); }
  ~Handle() { cublasLtDestroy(handle); }
  operator cublasLtHandle_t() const { return handle; }
  cublasLtHandle_t handle;
};

// Small integers are exact in every type.
double element(int which, std::int64_t i) { return static_cast<double>((i * 7 + which * 3) % 5) - 2; }

template <class T>
std::vector<T> elements(int which, std::int64_t count) {
  std::vector<T> v(count);
  for (std::int64_t i = 0; i < count; ++i) v[i] = T(static_cast<float>(element(which, i)));
  return v;
}

template <class T>
void run_case(const Case& c, cudaDataType_t type) {
  const bool wide = type == CUDA_R_64F;
  const int a_rows = c.ta ? c.k : c.m, a_cols = c.ta ? c.m : c.k, b_rows = c.tb ? c.n : c.k, b_cols = c.tb ? c.k : c.n;
  const auto size = [&](int rows, int cols) { return std::int64_t{rows + c.padding} * cols; };
  const auto at = [&](int row, int col, int rows) { return row + std::int64_t{col} * (rows + c.padding); };
  const std::int64_t sa = size(a_rows, a_cols), sb = size(b_rows, b_cols), sd = size(c.m, c.n);
  const Stream s;
  const Buffer<T> a(sa * c.batches + 1), b(sb * c.batches + 1), cc(sd * c.batches + 1), d(sd * c.batches + 1), bias(c.m + 1);
  const auto upload = [&](T* to, int which, std::int64_t count) {
    const auto v = elements<T>(which, count);
    OK(cudaMemcpyAsync(to, v.data(), count * sizeof(T), cudaMemcpyHostToDevice, s));
  };
  upload(a, 1, sa * c.batches), upload(b, 2, sb * c.batches), upload(cc, 3, sd * c.batches), upload(bias, 4, c.m);
  if (c.beta != 0 && !c.other_c) upload(d, 3, sd * c.batches);
  const Layout la(type, a_rows, a_cols, a_rows + c.padding, c.batches, sa);
  const Layout lb(type, b_rows, b_cols, b_rows + c.padding, c.batches, c.share_b ? 0 : sb);
  const Layout lc(type, c.m, c.n, c.m + c.padding, c.batches, sd);
  const Layout lout(type, c.m, c.n, c.m + c.padding, c.batches, sd);
  Desc desc(wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F);
  desc.set(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{c.ta ? CUBLAS_OP_T : CUBLAS_OP_N});
  desc.set(CUBLASLT_MATMUL_DESC_TRANSB, std::int32_t{c.tb ? CUBLAS_OP_T : CUBLAS_OP_N});
  desc.set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::int32_t{c.epilogue});
  if (c.epilogue & CUBLASLT_EPILOGUE_BIAS) desc.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void*>(bias.data));
  const Handle handle;
  cublasLtMatmulPreference_t preference;
  OK(cublasLtMatmulPreferenceCreate(&preference));
  const std::size_t bytes = 1024;
  OK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  OK(cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, lc, lout, preference, 1, &best, &found));
  EXPECT(found == 1);
  OK(cublasLtMatmulPreferenceDestroy(preference));
  {
    float alpha = c.alpha, beta = c.beta;  // The call reads alpha and beta before it returns.
    double alpha_wide = c.alpha, beta_wide = c.beta;
    OK(cublasLtMatmul(handle, desc, wide ? static_cast<void*>(&alpha_wide) : &alpha, a, la, b, lb,
                      wide ? static_cast<void*>(&beta_wide) : &beta, c.other_c ? cc.data : d.data, lc, d, lout, &best.algo,
                      nullptr, 0, s));
    alpha = beta = 99, alpha_wide = beta_wide = 99;
  }
  const auto got = fetch<T>(d, sd * c.batches, s);
  for (int batch = 0; batch < c.batches; ++batch) {
    for (int i = 0; i < c.m; ++i) {
      for (int j = 0; j < c.n; ++j) {
        double want = 0;
        for (int l = 0; l < c.k; ++l) {
          const auto ia = c.ta ? at(l, i, a_rows) : at(i, l, a_rows);
          const auto ib = c.tb ? at(j, l, b_rows) : at(l, j, b_rows);
          want += element(1, batch * sa + ia) * element(2, (c.share_b ? 0 : batch * sb) + ib);
        }
        const auto id = batch * sd + at(i, j, c.m);
        want *= c.alpha;
        if (c.beta != 0) want += c.beta * element(3, id);
        if (c.epilogue & CUBLASLT_EPILOGUE_BIAS) want += element(4, i);
        if (c.epilogue & CUBLASLT_EPILOGUE_RELU) want = std::max(want, 0.0);
        double tolerance = 0;
        if (c.epilogue & CUBLASLT_EPILOGUE_GELU) {
          want = 0.5 * want * (1 + std::tanh(0.7978845608028654 * (want + 0.044715 * want * want * want)));
          tolerance = 0.02 * std::abs(want) + 1e-4;
        }
        const double value = static_cast<double>(static_cast<float>(got[id]));
        if (!(std::abs(value - want) <= tolerance)) {
          throw Failure("type " + std::to_string(type) + " batch " + std::to_string(batch) + " [" + std::to_string(i) + ", " +
                        std::to_string(j) + "]: " + std::to_string(value) + ", not " + std::to_string(want));
        }
      }
    }
  }
}

void run_types(const Case& c) {
  run_case<float>(c, CUDA_R_32F);
  run_case<double>(c, CUDA_R_64F);
  run_case<__half>(c, CUDA_R_16F);
  run_case<__nv_bfloat16>(c, CUDA_R_16BF);
}

}  // namespace

TEST(transposes) {
  in_every_mode(
      1,
      [] {
        for (int bits = 0; bits < 12; ++bits) {
          Case c;
          c.ta = bits & 1, c.tb = bits & 2;
          c.padding = bits / 4;
          run_types(c);
        }
      },
      2);
}

TEST(batches_alpha_and_beta) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  for (const bool share : {false, true}) {
    for (const bool other : {false, true}) {
      Case c;
      c.batches = 3, c.share_b = share, c.other_c = other, c.alpha = 2, c.beta = other ? -1 : 1;
      run_types(c);
      c.padding = 1;
      run_types(c);
    }
  }
}

TEST(epilogues) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  for (const int epilogue : {CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU,
                             CUBLASLT_EPILOGUE_GELU_BIAS}) {
    Case c;
    c.epilogue = epilogue;
    run_types(c);
  }
}

TEST(large_enough_to_be_cut) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.workers = 3;
  configure(config);
  for (int bits = 0; bits < 4; ++bits) {
    Case c;
    c.m = bits & 1 ? 90 : 300, c.n = 200, c.k = 130;
    c.ta = bits & 2;
    c.epilogue = CUBLASLT_EPILOGUE_BIAS;
    run_case<float>(c, CUDA_R_32F);
    run_case<double>(c, CUDA_R_64F);
  }
}

TEST(empty_matrices) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  for (int empty = 0; empty < 3; ++empty) {
    Case c;
    (empty == 0 ? c.m : empty == 1 ? c.n : c.k) = 0;
    c.padding = 1;
    run_types(c);
  }
  Case c;
  c.batches = 0;
  run_types(c);
}

TEST(wrong_shapes_are_named) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Layout a(CUDA_R_32F, 4, 3, 4), b(CUDA_R_32F, 5, 2, 5);
  const Layout d(CUDA_R_32F, 4, 2, 4);
  const Desc desc(CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const Handle handle;
  const Buffer x(64);
  const float one = 1, zero = 0;
  EXPECT(cublasLtMatmul(handle, desc, &one, x, a, x, b, &zero, x, d, x, d, nullptr, nullptr, 0, nullptr) ==
         CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_IN("shapes do not match: A 4x3, B 5x2", cublasLtGetStatusString(CUBLAS_STATUS_INVALID_VALUE));
}

TEST(tf32_is_of_f32_alone) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Desc desc(CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F);
  const Handle handle;
  const Buffer x(16), y(16);
  const float one = 1, zero = 0;
  for (const cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF}) {
    const Layout a(type, 4, 4, 4);
    OK(cudaMemset(x, 0, 64));
    EXPECT(cublasLtMatmul(handle, desc, &one, x, a, x, a, &zero, y, a, y, a, nullptr, nullptr, 0, nullptr) ==
           (type == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED));
  }
  OK(cudaDeviceSynchronize());
}

TEST(a_shared_workspace_is_a_conflict) {
  configure(config_of(HW_CPU_SEEDED, 1, 1));
  const std::string error = run_ranks(1, [](int) {
    const Layout square(CUDA_R_32F, 4, 4, 4);
    const Desc desc(CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const Handle handle;
    const Buffer x(16), y(16), z(16), workspace(16);
    const Stream s, t;
    OK(cudaMemset(x, 0, 64));
    OK(cudaDeviceSynchronize());
    const float one = 1, zero = 0;
    OK(cublasLtMatmul(handle, desc, &one, x, square, x, square, &zero, y, square, y, square, nullptr, workspace, 64, s));
    OK(cublasLtMatmul(handle, desc, &one, x, square, x, square, &zero, z, square, z, square, nullptr, workspace, 64, t));
    OK(cudaDeviceSynchronize());
  });
  EXPECT_IN("missing dependency", error);
}
