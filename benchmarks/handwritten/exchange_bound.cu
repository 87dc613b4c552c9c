// Lower bounds of an all-reduce of few rows inside a kernel, on two GPUs. Four kernels are timed: an empty kernel, a kernel that
// only synchronizes with the peer, a kernel that also sends rows, and a kernel that also adds the received rows. A CUDA graph of
// sixteen dependent steps is launched four times. Each step is one kernel.
//
// Build   nvcc -O3 -std=c++17 -arch=sm_90 exchange_bound.cu -o exchange_bound
// Run     ./exchange_bound (on two GPUs with peer access).
// Output  The microseconds of a step on the slower GPU: the median of 15 measurements and their range. There is a line for each
//         number of rows, kind of step and number of thread blocks. A row has 8192 bf16 elements.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                          \
  do {                                                       \
    if (const cudaError_t e = (call)) {                      \
      std::printf("%s: %s\n", #call, cudaGetErrorString(e)); \
      std::exit(1);                                          \
    }                                                        \
  } while (0)

constexpr int kWidth = 8192, kMostRows = 32, kSteps = 16, kLaunches = 4, kMeasurements = 15, kThreads = 512;
constexpr size_t kBytes = size_t(kMostRows) * kWidth * sizeof(__nv_bfloat16);

enum Kind { nothing, meet, send, add };
constexpr const char* kNames[] = {"an empty kernel", "flags", "flags and transfer", "flags, transfer and sum"};

struct Step {
  const uint4 *term, *x;    // term of this GPU, and residual
  uint4 *landing, *theirs;  // landing buffers of this GPU and of the peer: two halves, used alternately
  uint4* y;                 // the result
  unsigned *flags, *peers;  // flags of this GPU, which the peer sets, and flags of the peer: one per block
  unsigned* step;           // number of finished steps of each block
  int vectors, half;
};

template <Kind kind>
__global__ void run(Step s) {
  if constexpr (kind == nothing) return;
  __shared__ unsigned now;
  if (threadIdx.x == 0) now = s.step[blockIdx.x] + 1;
  const int each = (s.vectors + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each, last = min(first + each, s.vectors);
  const size_t half = size_t(s.half) * s.vectors;
  if constexpr (kind >= send)
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) s.theirs[half + i] = s.term[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(s.peers + blockIdx.x), "r"(now) : "memory");
    unsigned seen = 0;
    while (seen < now) asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(s.flags + blockIdx.x) : "memory");
    s.step[blockIdx.x] = now;
  }
  __syncthreads();
  if constexpr (kind == add)
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) {
      uint4 own = s.term[i], other = __ldcg(&s.landing[half + i]), sum = s.x[i];
      const auto halves = [](uint4& of) { return reinterpret_cast<__nv_bfloat162*>(&of); };
      for (int e = 0; e < 4; ++e) halves(sum)[e] = __hadd2(halves(sum)[e], __hadd2(halves(own)[e], halves(other)[e]));
      s.y[i] = sum;
    }
}

struct Gpu {
  Step step{};
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

template <Kind kind>
void measure(Gpu (&gpus)[2], int rows, int blocks) {
  cudaGraphExec_t graphs[2];
  for (int r = 0; r < 2; ++r) {
    Gpu& gpu = gpus[r];
    CHECK(cudaSetDevice(r));
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kSteps; ++i) {
      Step step = gpu.step;
      step.vectors = rows * kWidth * int(sizeof(__nv_bfloat16)) / int(sizeof(uint4)), step.half = i % 2;
      run<kind><<<blocks, kThreads, 0, gpu.stream>>>(step);
    }
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(gpu.stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
    CHECK(cudaGraphDestroy(graph));
  }
  std::vector<float> us;
  for (int i = 0; i < kMeasurements; ++i) {
    for (int r = 0; r < 2; ++r) {
      CHECK(cudaSetDevice(r));
      CHECK(cudaGraphLaunch(graphs[r], gpus[r].stream));  // The warm-up makes both GPUs ready for the start of the measurement.
      CHECK(cudaEventRecord(gpus[r].begin, gpus[r].stream));
      for (int k = 0; k < kLaunches; ++k) CHECK(cudaGraphLaunch(graphs[r], gpus[r].stream));
      CHECK(cudaEventRecord(gpus[r].end, gpus[r].stream));
    }
    float most = 0;
    for (int r = 0; r < 2; ++r) {
      float ms;
      CHECK(cudaSetDevice(r));
      CHECK(cudaStreamSynchronize(gpus[r].stream));
      CHECK(cudaEventElapsedTime(&ms, gpus[r].begin, gpus[r].end));
      most = std::max(most, ms);
    }
    us.push_back(most * 1000 / (kLaunches * kSteps));
  }
  std::sort(us.begin(), us.end());
  std::printf("[%d, %d] %s, %d blocks: %.2f us (%.2f to %.2f)\n", rows, kWidth, kNames[kind], blocks, us[us.size() / 2],
              us.front(), us.back());
  for (const cudaGraphExec_t graph : graphs) CHECK(cudaGraphExecDestroy(graph));
}

int main() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  if (count < 2) {
    std::printf("two GPUs are needed, and there are %d\n", count);
    return 1;
  }
  Gpu gpus[2];
  const auto memory = [](size_t bytes) {
    void* made;
    CHECK(cudaMalloc(&made, bytes));
    CHECK(cudaMemset(made, 0, bytes));
    return made;
  };
  for (int r = 0; r < 2; ++r) {
    Gpu& gpu = gpus[r];
    CHECK(cudaSetDevice(r));
    CHECK(cudaDeviceEnablePeerAccess(1 - r, 0));
    gpu.step.term = static_cast<uint4*>(memory(kBytes)), gpu.step.x = static_cast<uint4*>(memory(kBytes));
    gpu.step.y = static_cast<uint4*>(memory(kBytes)), gpu.step.landing = static_cast<uint4*>(memory(2 * kBytes));
    gpu.step.flags = static_cast<unsigned*>(memory(4096)), gpu.step.step = static_cast<unsigned*>(memory(4096));
    CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&gpu.begin));
    CHECK(cudaEventCreate(&gpu.end));
    CHECK(cudaDeviceSynchronize());
  }
  for (int r = 0; r < 2; ++r) gpus[r].step.theirs = gpus[1 - r].step.landing, gpus[r].step.peers = gpus[1 - r].step.flags;
  for (const int rows : {1, 6, 16, kMostRows})
    for (const int blocks : {16, 32, 64, 128}) {
      measure<nothing>(gpus, rows, blocks);
      measure<meet>(gpus, rows, blocks);
      measure<send>(gpus, rows, blocks);
      measure<add>(gpus, rows, blocks);
    }
}
