// Median host time to launch a CUDA graph, by the kinds of its nodes. Graphs have the nodes of programs that use the
// transport `peer`: kernels, copies to another GPU, writes of signals, and waits for signals that have already arrived.
//
// Build   nvcc -O3 -std=c++17 -arch=sm_90 graph_launches.cu -o graph_launches -lcuda
// Run     ./graph_launches (on two GPUs with peer access).
// Output  A line for each graph: the number of its nodes, and the median microseconds of a launch in three states: the GPU is
//         idle; the GPU is busy with three earlier launches; nothing was launched for 20 ms.
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call)                                       \
  do {                                                    \
    if (const int error = int(call)) {                    \
      std::printf("%s: CUDA's error %d\n", #call, error); \
      std::exit(1);                                       \
    }                                                     \
  } while (0)

constexpr int kRepetitions = 30;
constexpr size_t kBytes = 1 << 20;  // bytes that a node copies

__global__ void add_one(float* x) {
  if (blockIdx.x == 0 && threadIdx.x == 0) x[0] += 1;
}

double median_launch(cudaGraphExec_t graph, cudaStream_t stream, int launches, useconds_t pause) {
  std::vector<double> us;
  for (int i = 0; i < kRepetitions; ++i) {
    usleep(pause);
    std::chrono::steady_clock::time_point begin;
    for (int k = 0; k < launches; ++k) {
      begin = std::chrono::steady_clock::now();
      CHECK(cudaGraphLaunch(graph, stream));
    }
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    CHECK(cudaStreamSynchronize(stream));
  }
  std::nth_element(us.begin(), us.begin() + kRepetitions / 2, us.end());
  return us[kRepetitions / 2];
}

int main() {
  int gpus = 0;
  CHECK(cudaGetDeviceCount(&gpus));
  if (gpus < 2) {
    std::printf("two GPUs are needed, and there are %d\n", gpus);
    return 1;
  }
  float *x, *peer;
  CUdeviceptr signals;  // The first signal is written. The second signal is awaited, and is always set.
  cudaStream_t main, side;
  cudaEvent_t event;
  CHECK(cudaSetDevice(1));
  CHECK(cudaMalloc(&peer, kBytes));
  CHECK(cudaSetDevice(0));
  CHECK(cudaDeviceEnablePeerAccess(1, 0));
  CHECK(cudaMalloc(&x, kBytes));
  CHECK(cuMemAlloc(&signals, 16));
  CHECK(cuMemsetD8(signals, 1, 16));
  CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

  const auto kernel = [&](cudaStream_t stream) { add_one<<<1, 32, 0, stream>>>(x); };
  const auto copy = [&](cudaStream_t stream) { CHECK(cudaMemcpyAsync(peer, x, kBytes, cudaMemcpyDefault, stream)); };
  const auto write = [&](cudaStream_t stream) { CHECK(cuStreamWriteValue64(stream, signals, 7, 0)); };
  const auto wait = [&](cudaStream_t stream) { CHECK(cuStreamWaitValue64(stream, signals + 8, 1, CU_STREAM_WAIT_VALUE_GEQ)); };
  const auto order = [&](cudaStream_t first, cudaStream_t second) {
    CHECK(cudaEventRecord(event, first));
    CHECK(cudaStreamWaitEvent(second, event, 0));
  };
  struct Case {
    const char* name;
    int repetitions;
    std::function<void()> body;
  };
  const Case cases[] = {
      {"kernels", 50, [&] { kernel(main); }},
      {"kernels", 200, [&] { kernel(main); }},
      {"copies", 50, [&] { copy(main); }},
      {"writes", 50, [&] { write(main); }},
      {"waits", 50, [&] { wait(main); }},
      {"a kernel, then a write", 50, [&] { kernel(main), write(main); }},
      {"a kernel, then a copy", 50, [&] { kernel(main), copy(main); }},
      {"a kernel on each of two streams", 50, [&] { order(main, side), kernel(main), kernel(side), order(side, main); }},
      {"a kernel, and a copy on a second stream", 50, [&] { order(main, side), kernel(main), copy(side), order(side, main); }},
      {"a kernel, and a wait, a copy and a write on a second stream", 50,
       [&] { order(main, side), kernel(main), wait(side), copy(side), write(side), order(side, main); }},
  };
  for (const Case& one : cases) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    size_t nodes;
    CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < one.repetitions; ++i) one.body();
    CHECK(cudaStreamEndCapture(main, &graph));
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, main));
    CHECK(cudaStreamSynchronize(main));
    const double alone = median_launch(executable, main, 1, 0), behind = median_launch(executable, main, 4, 0);
    std::printf("%d x %s, %zu nodes: %.1f us, behind three launches %.1f us, after 20 ms %.1f us\n", one.repetitions, one.name,
                nodes, alone, behind, median_launch(executable, main, 1, 20000));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
  }
}
