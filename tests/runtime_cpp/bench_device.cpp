// Benchmark of the CPU device: a matmul compared with direct OpenBLAS calls, and the overhead of an operation.
#include <algorithm>
#include <chrono>

#include "testing.h"

extern "C" {
void scipy_cblas_sgemm(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void scipy_openblas_set_num_threads(int);
}

using namespace testing;

namespace {

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class T>
void matmul(int n, cudaDataType_t type, const char* name, bool one_core) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.workers = one_core ? 1 : 0;
  configure(config);
  const int threads = one_core ? 1 : static_cast<int>(std::thread::hardware_concurrency());
  const std::size_t size = std::size_t{1} * n * n;
  const Buffer<T> a(size), b(size), c(size);
  std::vector<float> fa(size, 1), fb(size, 1), fc(size);
  const Stream s;
  OK(cudaMemsetAsync(a, 0, size * sizeof(T), s));
  OK(cudaMemsetAsync(b, 0, size * sizeof(T), s));
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout;
  OK(cublasLtCreate(&handle));
  OK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  OK(cublasLtMatrixLayoutCreate(&layout, type, n, n, n));
  const float one = 1, zero = 0;
  std::vector<double> ours, direct;
  for (int i = 0; i < 7; ++i) {
    scipy_openblas_set_num_threads(threads);
    direct.push_back(seconds([&] { scipy_cblas_sgemm(102, 111, 111, n, n, n, 1, fa.data(), n, fb.data(), n, 0, fc.data(), n); }));
    ours.push_back(seconds([&] {
      OK(cublasLtMatmul(handle, desc, &one, a, layout, b, layout, &zero, c, layout, c, layout, nullptr, nullptr, 0, s));
      OK(cudaStreamSynchronize(s));
    }));
  }
  const double best_ours = *std::min_element(ours.begin() + 1, ours.end()),
               best_direct = *std::min_element(direct.begin() + 1, direct.end());
  std::printf("%s %d on %d threads: %.1f GFLOP/s, OpenBLAS in f32 directly %.1f, ratio %.2f\n", name, n, threads,
              2e-9 * n * n * n / best_ours, 2e-9 * n * n * n / best_direct, best_direct / best_ours);
  OK(cublasLtMatrixLayoutDestroy(layout));
  OK(cublasLtMatmulDescDestroy(desc));
  OK(cublasLtDestroy(handle));
}

void ops(int mode, int check) {
  hw_cpu_config config = config_of(mode, 1, 5);
  config.check_dependencies = check;
  configure(config);
  constexpr int count = 20000;
  double enqueue = 0, all = 0;
  const std::string error = run_ranks(1, [&](int) {
    const Stream s;
    const Buffer x(16);
    all = seconds([&] {
      enqueue = seconds([&] {
        for (int i = 0; i < count; ++i) OK(cudaMemsetAsync(x, 0, 64, s));
      });
      OK(cudaStreamSynchronize(s));
    });
  });
  EXPECT(error.empty());
  std::printf("%s%s: enqueue %.2f us, end to end %.2f us an op\n", mode == HW_CPU_SEEDED ? "seeded" : "parallel",
              check ? ", checking dependencies" : "", enqueue * 1e6 / count, all * 1e6 / count);
}

}  // namespace

int main() {
  for (const bool one_core : {true, false}) {
    for (const int n : {256, 1024, 2048}) {
      matmul<float>(n, CUDA_R_32F, "f32", one_core);
      matmul<__nv_bfloat16>(n, CUDA_R_16BF, "bf16", one_core);
      matmul<__half>(n, CUDA_R_16F, "f16", one_core);
    }
  }
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    for (const int check : {0, 1}) ops(mode, check);
  }
}
