// Ends the waits of streams for signals of a peer that has exited.
//
// NCCL makes streams wait for values in device memory (cuStreamBatchMemOp), and ncclCommAbort does not end these waits. The graph
// of a captured wait contains the address of one of the values. Large values in the allocation at that address end all waits.
#include <nccl.h>
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0) && \
    !defined(HOSTWEAVE_CPU_DEVICE)  // Since version 2.32, NCCL can create signals with the communicator.
#define HOSTWEAVE_FINDS_SIGNALS
#include <cuda.h>
#endif

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/driver_function.h"
#include "hostweave/reach.h"
#include "target.h"

namespace hw::target {
namespace {

using namespace std::chrono_literals;

constexpr int kLarge = 0x7f;    // value of each byte; makes a signal larger than any count
constexpr auto kPatience = 5s;  // time for the waiting work to end

// Memory in which signals of a communicator arrive.
struct Signals {
  void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  cudaStream_t stream = nullptr;  // writes the signals
};

std::mutex known_mutex;
auto& known() { return immortal<std::map<ncclComm_t, Signals>>(); }  // guarded by known_mutex

#ifdef HOSTWEAVE_FINDS_SIGNALS
// Address that a wait of the graph reads; 0 if no wait is found.
CUdeviceptr awaited(cudaGraph_t graph) {
  static auto* const params_of = driver_function<decltype(cuGraphBatchMemOpNodeGetParams)>("cuGraphBatchMemOpNodeGetParams");
  size_t count = 0;
  if (!params_of || cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) return 0;
  std::vector<cudaGraphNode_t> nodes(count);
  if (cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) return 0;
  for (const cudaGraphNode_t node : nodes) {
    CUDA_BATCH_MEM_OP_NODE_PARAMS params{};
    if (params_of(node, &params) == CUDA_SUCCESS && params.count > 0) return params.paramArray[0].waitValue.address;
  }
  return 0;
}
#endif

// Sets all signals until the device is idle, for at most kPatience.
void give(const std::vector<Signals>& signals) {
  if (signals.empty()) return;
  const auto idle = std::make_shared<std::atomic<bool>>(false);
  in_background([device = signals.front().device, idle] {
    cudaSetDevice(device);
    cudaDeviceSynchronize();
    *idle = true;
  });
  const auto end = std::chrono::steady_clock::now() + kPatience;
  // Late signals of peers overwrite the values, so the values are written repeatedly.
  while (!*idle && std::chrono::steady_clock::now() < end) {
    for (const Signals& one : signals) {
      if (cudaStreamQuery(one.stream) == cudaSuccess) cudaMemsetAsync(one.data, kLarge, one.bytes, one.stream);
    }
    std::this_thread::sleep_for(5ms);
  }
}

}  // namespace

void find_signals(ncclComm_t comm, const ProcessGroup& process_group) {
#ifdef HOSTWEAVE_FINDS_SIGNALS
  static auto* const range_of = driver_function<CUresult(CUdeviceptr*, size_t*, CUdeviceptr)>("cuMemGetAddressRange_v2");
  {
    const std::lock_guard lock(known_mutex);
    if (const auto closed = known().extract(comm)) (void)cudaStreamDestroy(closed.mapped().stream);
  }
  if (process_group.transport != Transport::one_sided || process_group.size < 2 || !range_of || !ncclWaitSignal) return;
  Signals found;
  int least = 0, greatest = 0;
  HW_CHECK(cudaGetDevice(&found.device));
  HW_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Streams of programs have other priorities. So these writes do not queue behind streams that wait.
  HW_CHECK(cudaStreamCreateWithPriority(&found.stream, cudaStreamNonBlocking, (least + greatest) / 2));
  HW_CHECK(cudaStreamBeginCapture(found.stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  const auto next_rank = static_cast<int>((process_group.rank_in_group + 1) % process_group.size);
  ncclWaitSignalDesc_t next{.opCnt = 1, .peer = next_rank, .sigIdx = 0, .ctx = 0};
  (void)ncclWaitSignal(1, &next, comm, found.stream);
  (void)cudaStreamEndCapture(found.stream, &graph);
  const CUdeviceptr address = graph ? awaited(graph) : 0;
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
  CUdeviceptr begin = 0;
  if (!address || range_of(&begin, &found.bytes, address) != CUDA_SUCCESS) {
    (void)cudaStreamDestroy(found.stream);
    return;
  }
  found.data = reinterpret_cast<void*>(begin);
  const std::lock_guard lock(known_mutex);
  known()[comm] = found;
#else
  (void)comm, (void)process_group;
#endif
}

void abort(const std::vector<ncclComm_t>& comms) {
  std::vector<ncclComm_t> others, signalled;
  std::vector<Signals> signals;
  {
    const std::lock_guard lock(known_mutex);
    for (const ncclComm_t comm : comms) {
      const auto found = known().find(comm);
      (found == known().end() ? others : signalled).push_back(comm);
      if (found != known().end()) signals.push_back(known().extract(found).mapped());
    }
  }
  int device = 0;
  (void)cudaGetDevice(&device);
  // Runs concurrently with `give`, because aborts wait for graphs, and graphs may wait for signals.
  const std::jthread beside([&] {
    cudaSetDevice(device);
    abort_with_windows(others);
  });
  give(signals);
  abort_with_windows(signalled);
}

}  // namespace hw::target
