// Building blocks of put_pipelines.cu: ranks, matmuls, gathers, puts and signals; checks and measurements of calls.
#pragma once
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0), "put_pipelines needs the nccl.h of NCCL 2.32 or later");
// nccl_device.h declares this function.
extern "C" ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t offset, int peer, void**);

[[noreturn]] void fail(const char* what, const char* why) {
  std::fprintf(stderr, "put_pipelines: %s: %s\n", what, why);
  std::_Exit(2);  // The process ends, because the other ranks would wait forever.
}
#define CHECK_CUDA(call)                       \
  do {                                         \
    const auto e = (call);                     \
    if (e) fail(#call, cudaGetErrorString(e)); \
  } while (0)
#define CHECK_NCCL(call)                       \
  do {                                         \
    const auto e = (call);                     \
    if (e) fail(#call, ncclGetErrorString(e)); \
  } while (0)
#define CHECK_CUBLAS(call)                        \
  do {                                            \
    const auto e = (call);                        \
    if (e) fail(#call, cublasGetStatusString(e)); \
  } while (0)

using bf16 = __nv_bfloat16;
// Enqueues the measured work. Other streams fork from the main stream of the rank, and join it.
using Call = std::function<void()>;
constexpr size_t KiB = 1 << 10, MiB = 1 << 20, kLargestShard = 256 * MiB, kBlasWorkspace = 32 * MiB;
constexpr int kWarmups = 3, kRepetitions = 15, kCallsInARow = 20, kSignals = 64, kCreditSignal = 63;
// Blocks, and threads of a block, of fill, add_landed and compare. 132 multiprocessors can run exactly this many threads.
constexpr int kBlocks = 1056, kThreads = 256;
constexpr long long kSpinCycles = 4'000'000;  // about 2 ms; the host needs less time to enqueue a call on 8 GPUs
constexpr double kTolerance = 0.02;           // relative to the largest value; allows a few roundings to bf16

// ---------------------------------------------------------------------------------------------------------- kernels
__device__ size_t first() { return blockIdx.x * size_t(blockDim.x) + threadIdx.x; }
__device__ size_t step() { return size_t(gridDim.x) * blockDim.x; }

__global__ void spin(long long cycles) {
  for (auto start = clock64(); clock64() - start < cycles;) {
  }
}

// Random values in [-0.5, 0.5]. Matmuls of zeros would need less power and run faster.
__global__ void fill(bf16* data, size_t count, unsigned seed) {
  for (size_t i = first(); i < count; i += step()) {
    const unsigned hash = (unsigned(i) + seed * 0x9e3779b9u) * 2654435761u, mixed = (hash ^ hash >> 15) * 2246822519u;
    data[i] = __float2bfloat16((mixed >> 16) / 65536.f - 0.5f);
  }
}

// Adds received blocks to y one by one, and rounds each sum to bf16. Blocks are `stride` elements apart. The count and the stride
// are multiples of 8.
__global__ void add_landed(bf16* y, const bf16* landed, int blocks, size_t stride, size_t count) {
  struct alignas(16) Pack {
    __nv_bfloat162 of[4];
  };  // one vector load
  for (size_t i = first() * 8; i < count; i += step() * 8) {
    Pack sum = *reinterpret_cast<const Pack*>(y + i);
    for (int block = 0; block < blocks; ++block) {
      const Pack term = *reinterpret_cast<const Pack*>(landed + block * stride + i);
      for (int e = 0; e < 4; ++e) sum.of[e] = __hadd2(sum.of[e], term.of[e]);
    }
    *reinterpret_cast<Pack*>(y + i) = sum;
  }
}

// max |a - b| and max |b|, as bits of floats. The bits have the order of the numbers, and NaN is the largest.
__global__ void compare(const bf16* a, const bf16* b, size_t count, unsigned* largest) {
  unsigned difference = 0, magnitude = 0;
  for (size_t i = first(); i < count; i += step()) {
    difference = max(difference, __float_as_uint(fabsf(__bfloat162float(a[i]) - __bfloat162float(b[i]))));
    magnitude = max(magnitude, __float_as_uint(fabsf(__bfloat162float(b[i]))));
  }
  atomicMax(&largest[0], difference);
  atomicMax(&largest[1], magnitude);
}

// ------------------------------------------------------------------------------------------------------------ ranks
struct MatmulStream {
  cudaStream_t stream;
  cublasHandle_t blas;
};  // a compute stream

struct Gpu {  // one rank
  int rank, ranks;
  std::vector<std::string> wanted;  // sections and cases to run; all if empty
  ncclComm_t comm;
  MatmulStream matmul_streams[2];
  cudaStream_t main, transfers;  // main is the stream of matmul_streams[0]
  cudaEvent_t begin, end, link;
  bf16 *plain, *window;  // each case defines the layout of this memory; the window has the same layout on all ranks
  ncclWindow_t handle;
  std::vector<bf16*> window_of;  // address of each rank's window on this GPU
  void* numbers;                 // for all-reduces of a few numbers
  bool wrong;                    // true if the results of a variant were wrong

  int ahead(int distance) const { return (rank + distance) % ranks; }
  int behind(int distance) const { return (rank + ranks - distance) % ranks; }
  bool wants(const std::string& section, const std::string& name = "") const {
    return wanted.empty() ||
           std::any_of(wanted.begin(), wanted.end(), [&](const auto& one) { return one == section || one == name; });
  }
};

void open_streams(Gpu& gpu) {
  for (MatmulStream& on : gpu.matmul_streams) {
    void* workspace;  // explicit, so that cuBLAS does not allocate during a capture
    CHECK_CUDA(cudaMalloc(&workspace, kBlasWorkspace));
    CHECK_CUDA(cudaStreamCreateWithFlags(&on.stream, cudaStreamNonBlocking));
    CHECK_CUBLAS(cublasCreate(&on.blas));
    CHECK_CUBLAS(cublasSetStream(on.blas, on.stream));
    CHECK_CUBLAS(cublasSetWorkspace(on.blas, workspace, kBlasWorkspace));
  }
  gpu.main = gpu.matmul_streams[0].stream;
  CHECK_CUDA(cudaStreamCreateWithPriority(&gpu.transfers, cudaStreamNonBlocking, -100));  // clamped to the highest
  for (cudaEvent_t* event : {&gpu.begin, &gpu.end}) CHECK_CUDA(cudaEventCreate(event));
  CHECK_CUDA(cudaEventCreateWithFlags(&gpu.link, cudaEventDisableTiming));
}

void open_memory(Gpu& gpu) {
  const size_t bytes = (gpu.ranks + 1) * kLargestShard;  // the largest case: a shard, and the shards of all ranks
  CHECK_CUDA(cudaMalloc(&gpu.numbers, kRepetitions * sizeof(double)));
  CHECK_CUDA(cudaMalloc(&gpu.plain, bytes));
  CHECK_NCCL(ncclMemAlloc(reinterpret_cast<void**>(&gpu.window), bytes));
  CHECK_NCCL(ncclCommWindowRegister(gpu.comm, gpu.window, bytes, &gpu.handle, NCCL_WIN_COLL_SYMMETRIC));
  for (int peer = 0; peer < gpu.ranks; ++peer) {
    void* base = gpu.window;
    if (peer != gpu.rank) CHECK_NCCL(ncclGetPeerDevicePointer(gpu.handle, 0, peer, &base));
    gpu.window_of.push_back(static_cast<bf16*>(base));
  }
}

// ------------------------------------------------------------------------------------------- building blocks of calls
// Work that is enqueued on `later` from now on waits for the work that is now on `earlier`.
void order(Gpu& gpu, cudaStream_t earlier, cudaStream_t later) {
  CHECK_CUDA(cudaEventRecord(gpu.link, earlier));
  CHECK_CUDA(cudaStreamWaitEvent(later, gpu.link));
}
void fork_streams(Gpu& gpu) {
  for (auto s : {gpu.transfers, gpu.matmul_streams[1].stream}) order(gpu, gpu.main, s);
}
void join_streams(Gpu& gpu) {
  for (auto s : {gpu.transfers, gpu.matmul_streams[1].stream}) order(gpu, s, gpu.main);
}

// y[m, n] = x[m, k] @ w[k, n] + beta * y. cuBLAS is column-major and sees transposes, so the factors are swapped.
void matmul(const MatmulStream& on, int m, int n, int k, const bf16* x, const bf16* w, bf16* y, float beta = 0) {
  const float alpha = 1;
  CHECK_CUBLAS(cublasGemmEx(on.blas, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &alpha, w, CUDA_R_16BF, n, x, CUDA_R_16BF, k, &beta, y,
                            CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

void copy(bf16* to, const bf16* from, size_t count, cudaStream_t stream) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, count * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
}

void all_gather(Gpu& gpu, const bf16* shard, bf16* all, size_t count) {
  CHECK_NCCL(ncclAllGather(shard, all, count, ncclBfloat16, gpu.comm, gpu.main));
}

// Address in the peer's window that corresponds to a block of this rank's window.
bf16* on_peer(const Gpu& gpu, int peer, const bf16* block) { return gpu.window_of[peer] + (block - gpu.window); }
int signal_number(int distance, int piece = 0) { return distance * 8 + piece; }

// Writes to the peer's copy of `to`, and then sends the signal to the peer. `from` and `to` are in the window. Only one stream of
// a rank may put or signal at a time, because NCCL stages signal values in memory that all streams share.
void put(Gpu& gpu, const bf16* from, size_t count, int peer, const bf16* to, int signal, cudaStream_t stream) {
  const size_t offset = (to - gpu.window) * sizeof(bf16);
  CHECK_NCCL(ncclPutSignal(from, count, ncclBfloat16, peer, gpu.handle, offset, signal, 0, 0, gpu.comm, stream));
}

void await(Gpu& gpu, int peer, int signal, cudaStream_t stream) {
  ncclWaitSignalDesc_t once{.opCnt = 1, .peer = peer, .sigIdx = signal, .ctx = 0};
  CHECK_NCCL(ncclWaitSignal(1, &once, gpu.comm, stream));
}

// -------------------------------------------------------------------------------------------- checking and measuring
struct Case {
  const char* section;
  std::string name;
  double bytes, flops;                                 // per call; 0 if not reported
  const bf16 *result = nullptr, *expected = nullptr;   // without a result nothing is checked
  size_t count = 0;                                    // elements of the result
  std::vector<std::pair<bf16*, size_t>> scratch = {};  // memory that variants write, including the result
};

// Barrier of the main streams of all ranks.
void meet(Gpu& gpu) { CHECK_NCCL(ncclAllReduce(gpu.numbers, gpu.numbers, 1, ncclDouble, ncclMax, gpu.comm, gpu.main)); }

// Collective. Replaces each value by the largest of all ranks, and returns the median.
double median_of_slowest(Gpu& gpu, std::vector<double> values) {
  const size_t bytes = values.size() * sizeof(double);
  CHECK_CUDA(cudaMemcpyAsync(gpu.numbers, values.data(), bytes, cudaMemcpyHostToDevice, gpu.main));
  CHECK_NCCL(ncclAllReduce(gpu.numbers, gpu.numbers, values.size(), ncclDouble, ncclMax, gpu.comm, gpu.main));
  CHECK_CUDA(cudaMemcpyAsync(values.data(), gpu.numbers, bytes, cudaMemcpyDeviceToHost, gpu.main));
  CHECK_CUDA(cudaStreamSynchronize(gpu.main));
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Collective: maximum difference from the expected result over all ranks, relative to the largest expected value.
double error_of(Gpu& gpu, const Case& c, const Call& call) {
  for (auto [data, count] : c.scratch) CHECK_CUDA(cudaMemsetAsync(data, 0xFF, count * sizeof(bf16), gpu.main));  // NaN
  meet(gpu);
  call();
  float largest[2];
  CHECK_CUDA(cudaMemsetAsync(gpu.numbers, 0, sizeof largest, gpu.main));
  compare<<<kBlocks, kThreads, 0, gpu.main>>>(c.result, c.expected, c.count, static_cast<unsigned*>(gpu.numbers));
  CHECK_NCCL(ncclAllReduce(gpu.numbers, gpu.numbers, 2, ncclUint32, ncclMax, gpu.comm, gpu.main));
  CHECK_CUDA(cudaMemcpyAsync(largest, gpu.numbers, sizeof largest, cudaMemcpyDeviceToHost, gpu.main));
  CHECK_CUDA(cudaStreamSynchronize(gpu.main));
  return largest[0] / largest[1];
}

std::pair<double, double> measure(Gpu& gpu, const Call& call) {  // milliseconds on the GPU, microseconds on the host
  std::vector<double> ms, host_us;
  for (int repetition = -kWarmups; repetition < kRepetitions; ++repetition) {
    spin<<<1, 1, 0, gpu.main>>>(kSpinCycles);
    meet(gpu);
    CHECK_CUDA(cudaEventRecord(gpu.begin, gpu.main));
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - start;
    CHECK_CUDA(cudaEventRecord(gpu.end, gpu.main));
    CHECK_CUDA(cudaEventSynchronize(gpu.end));
    float elapsed;
    CHECK_CUDA(cudaEventElapsedTime(&elapsed, gpu.begin, gpu.end));
    if (repetition < 0) continue;
    ms.push_back(elapsed);
    host_us.push_back(host.count());
  }
  return {median_of_slowest(gpu, ms), median_of_slowest(gpu, host_us)};
}

// Checks the variant if the case has a result. If the check passes, measures the variant. Rank 0 prints the time or the error.
// `call` repeats the case `calls` times. The check runs twice, because some errors appear only in the second replay of a graph.
// An example is a wait that accepts a signal of the first replay.
void run(Gpu& gpu, const Case& c, const std::string& variant, const Call& call, int calls = 1) {
  double error = 0;
  for (int check = 0; check < 2 && c.result && error < kTolerance; ++check) error = error_of(gpu, c, call);
  const bool right = error < kTolerance;  // This is false for NaN.
  gpu.wrong |= !right;
  const auto [ms, host_us] = right ? measure(gpu, call) : std::pair(0.0, 0.0);
  if (gpu.rank != 0) return;
  std::printf(R"({"section": "%s", "case": "%s", "variant": "%s", "gpus": %d, )", c.section, c.name.c_str(), variant.c_str(),
              gpu.ranks);
  const auto rate = [&, ms = ms](double amount) { return amount > 0 ? std::to_string(amount * calls / ms) : "null"; };
  if (!right)
    std::printf(R"("wrong": "%g"})"
                "\n",
                error);
  else
    std::printf(R"("ms": %.4f, "host_us": %.1f, "gbs": %s, "tflops": %s})"
                "\n",
                ms / calls, host_us / calls, rate(c.bytes / 1e6).c_str(), rate(c.flops / 1e9).c_str());
  std::fflush(stdout);
}

void run_as_graph(Gpu& gpu, const Case& c, const std::string& variant, const Call& call) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(gpu.main, cudaStreamCaptureModeThreadLocal));
  call();
  CHECK_CUDA(cudaStreamEndCapture(gpu.main, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  run(gpu, c, variant + " graph", [&] { CHECK_CUDA(cudaGraphLaunch(executable, gpu.main)); });
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
}
