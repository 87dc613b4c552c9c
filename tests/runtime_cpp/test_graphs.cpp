// Stream capture, and launches of captured graphs.
#include "testing.h"

using namespace testing;

namespace {

struct Graph {
  explicit Graph(cudaGraph_t graph) {
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(exec); }
  cudaGraphExec_t exec = nullptr;
};

cudaGraph_t end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

cudaError_t add_one(float* to, cudaStream_t stream) {
  const hw_cpu_range ranges[] = {{to, sizeof(float), 1, 0, 0}, {to, sizeof(float), 1, 0, 1}};
  return hw_cpu_launch("add_one", stream, [](void* closure) { ++**static_cast<float**>(closure); }, &to, sizeof to, ranges, 2);
}

// Tests that a capture fails, and that the stream is usable afterwards.
void expect_invalid(const Stream& stream, cudaError_t got, cudaError_t wanted) {
  EXPECT(got == wanted);
  cudaGraph_t graph = nullptr;
  EXPECT(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
  const Buffer x(1);
  OK(set(x, 5, 1, stream));
  EXPECT(fetch<float>(x, 1, stream)[0] == 5);
}

}  // namespace

TEST(nothing_runs_before_the_launch_and_everything_in_each) {
  on_ranks(1, [](int) {
    const Stream a, b, launch;
    const Event fork, join;
    const Buffer x(2);
    OK(set(x, 0, 2, a));
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    OK(add_one(x, a));
    OK(cudaEventRecord(fork, a));
    OK(cudaStreamWaitEvent(b, fork));
    OK(cudaMemcpyAsync(x + 1, x, 4, cudaMemcpyDeviceToDevice, b));
    OK(cudaEventRecord(join, b));
    OK(cudaStreamWaitEvent(a, join));
    OK(add_one(x, a));
    const Graph graph(end(a));
    EXPECT(fetch<float>(x, 1, launch)[0] == 0);
    for (int i = 0; i < 3; ++i) OK(cudaGraphLaunch(graph.exec, i == 1 ? a : launch));  // Launches of one graph run in order.
    OK(cudaStreamSynchronize(a));
    const std::vector<float> result = fetch<float>(x, 2, launch);
    EXPECT(result[0] == 6 && result[1] == 5);
  });
}

TEST(external_events_order_launches_and_calls) {
  on_ranks(1, [](int) {
    const Stream a, b, c;
    const Event last;
    const Buffer x(1);
    OK(set(x, 0, 1, b));
    OK(cudaEventRecord(last, b));
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    OK(cudaStreamWaitEvent(a, last, cudaEventWaitExternal));
    OK(add_one(x, a));
    OK(cudaEventRecordWithFlags(last, a, cudaEventRecordExternal));
    const Graph graph(end(a));
    for (int i = 0; i < 3; ++i) {
      OK(cudaGraphLaunch(graph.exec, c));
      OK(cudaStreamWaitEvent(b, last));
      OK(add_one(x, b));
      OK(cudaEventRecord(last, b));
    }
    EXPECT(fetch<float>(x, 1, b)[0] == 6);
    EXPECT(cudaEventQuery(last) == cudaSuccess);
  });
}

TEST(communications_are_matched_when_they_are_launched) {
  in_every_mode(
      2,
      [] {
        ncclUniqueId id;
        OK(ncclGetUniqueId(&id));
        const std::string error = run_ranks(2, [&](int rank) {
          const Comm comm(id, 2, rank);
          const Stream s;
          const Buffer x(1);
          OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
          OK(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, s));
          const Graph graph(end(s));
          OK(set(x, static_cast<float>(1 + rank), 1, s));
          if (rank == 0) {  // A launch on one rank matches a call on the other.
            OK(cudaGraphLaunch(graph.exec, s));
            OK(cudaGraphLaunch(graph.exec, s));
          } else {
            OK(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, s));
            OK(cudaGraphLaunch(graph.exec, s));
          }
          EXPECT(fetch<float>(x, 1, s)[0] == 6);
        });
        EXPECT(error.empty());
      },
      4);
}

TEST(pinned_memory_is_copied_in_graphs) {
  on_ranks(1, [](int) {
    const Stream s;
    const Buffer x(1);
    float* there = nullptr;
    OK(cudaMallocHost(reinterpret_cast<void**>(&there), 4));
    EXPECT(cudaFree(there) == cudaErrorInvalidValue);
    EXPECT(std::string(cudaGetErrorString(cudaErrorInvalidValue)).ends_with("from cudaMallocHost; use cudaFreeHost"));
    EXPECT(cudaFreeHost(x) == cudaErrorInvalidValue);
    EXPECT(std::string(cudaGetErrorString(cudaErrorInvalidValue)).ends_with("is device memory; use cudaFree"));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(set(x, 3, 1, s));
    OK(cudaMemcpyAsync(there, x, 4, cudaMemcpyDeviceToHost, s));
    const Graph graph(end(s));
    OK(cudaGraphLaunch(graph.exec, s));
    OK(cudaStreamSynchronize(s));
    EXPECT(*there == 3);
    OK(cudaFreeHost(there));
  });
}

TEST(what_ends_a_capture) {
  on_ranks(1, [](int) {
    const Stream s, other;
    const Event outside, inside;
    const Buffer x(1);
    OK(cudaEventRecord(outside, other));
    const auto fails = [&](cudaError_t wanted, const std::function<cudaError_t()>& call) {
      OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
      expect_invalid(s, call(), wanted);
    };
    fails(cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(s, outside); });
    fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(s); });
    fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(s); });
    fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaDeviceSynchronize(); });
    fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(outside); });
    fails(cudaErrorCapturedEvent, [&] {
      OK(cudaEventRecord(inside, s));
      return cudaEventQuery(inside);
    });
    fails(cudaErrorStreamCaptureUnsupported, [&] {
      void* memory = nullptr;
      return cudaMalloc(&memory, 16);
    });
    fails(cudaErrorStreamCaptureUnsupported, [&] {
      float there = 0;
      return cudaMemcpyAsync(x, &there, 4, cudaMemcpyHostToDevice, s);
    });
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    const Comm comm(id, 1, 0);
    fails(cudaErrorStreamCaptureUnsupported, [&] {
      ncclWindow_t window = nullptr;
      EXPECT(ncclCommWindowRegister(comm, x, 4, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclUnhandledCudaError && !window);
      return cudaErrorStreamCaptureUnsupported;
    });

    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(inside, s));
    OK(cudaStreamWaitEvent(other, inside));
    OK(set(x, 1, 1, other));
    cudaGraph_t graph = nullptr;
    EXPECT(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureUnjoined && !graph);
    EXPECT(cudaStreamWaitEvent(other, inside) == cudaErrorCapturedEvent);
    EXPECT(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal) == cudaErrorStreamCaptureUnsupported);
  });
}

TEST(what_other_threads_may_do) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Stream s;
  const auto elsewhere = [](const std::function<cudaError_t()>& call) {
    cudaError_t result = cudaSuccess;
    std::thread([&] { result = call(); }).join();
    return result;
  };
  const auto in_mode = [&](cudaStreamCaptureMode capture, cudaStreamCaptureMode thread) {
    OK(cudaStreamBeginCapture(s, capture));
    const cudaError_t result = elsewhere([&] {
      cudaStreamCaptureMode mode = thread;
      OK(cudaThreadExchangeStreamCaptureMode(&mode));
      EXPECT(mode == cudaStreamCaptureModeGlobal);
      return cudaDeviceSynchronize();
    });
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(s, &graph);
    EXPECT(ended == (result == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
    if (graph) OK(cudaGraphDestroy(graph));
    return result;
  };
  EXPECT(in_mode(cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal) == cudaSuccess);
  EXPECT(in_mode(cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed) == cudaSuccess);
  EXPECT(in_mode(cudaStreamCaptureModeGlobal, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
}
