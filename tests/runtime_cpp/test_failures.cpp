// Calls after a failure or an invalid call, and other rare states of the device.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "testing.h"

using namespace testing;

TEST(a_refused_configuration_changes_nothing) {
  configure(config_of(HW_CPU_PARALLEL, 2));
  const std::string error = run_ranks(2, [](int r) {
    EXPECT(hw_cpu_barrier(2) == 0);
    const hw_cpu_config other = config_of(HW_CPU_PARALLEL, 2);
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // Rank 0 probably waits at the barrier now.
    if (r == 1) EXPECT(hw_cpu_configure(&other) != 0);
    EXPECT(hw_cpu_barrier(2) == 0);
  });
  if (!error.empty()) throw Failure(error);
}

TEST(a_window_that_some_ranks_registered_stops_the_communicator) {
  configure(config_of(HW_CPU_PARALLEL, 2));
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  ncclComm_t comms[2];
  const auto register_on = [&](const std::vector<int>& ranks) {
    return run_ranks(2, [&](int r) {
      if (ranks.size() == 1) OK(ncclCommInitRank(&comms[r], 2, id, r));
      const Buffer memory(256);
      ncclWindow_t window;
      for (const int rank : ranks)
        if (rank == r) OK(ncclCommWindowRegister(comms[r], memory, 1024, &window, NCCL_WIN_COLL_SYMMETRIC));
    });
  };
  EXPECT_IN("waits for all ranks of communicator", register_on({0}));
  configure(config_of(HW_CPU_PARALLEL, 2));
  EXPECT_IN("the communicator was stopped by an earlier failure", register_on({0, 1}));
  configure(config_of(HW_CPU_PARALLEL, 2));
  for (const ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

TEST(a_rank_of_a_failed_run_leaves_when_its_work_has_ended) {
  static std::atomic<bool> runs = false;
  configure(config_of(HW_CPU_PARALLEL, 2));
  run_ranks(2, [](int r) {
    const auto work = [](void*) {
      runs = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      runs = false;
    };
    if (r == 1) OK(hw_cpu_launch("long", nullptr, work, nullptr, 0, nullptr, 0));
    while (r == 0 && !runs) std::this_thread::yield();
    if (r == 0) throw Failure("a test");
    cudaDeviceSynchronize();
  });
  EXPECT(!runs);
}

TEST(a_failed_record_leaves_the_event_usable) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Stream stream;
  const Event event;
  OK(cudaEventRecord(event, stream));
  hw_cpu_abort("a test");
  EXPECT(cudaEventRecord(event, stream) != cudaSuccess);
  configure(config_of(HW_CPU_PARALLEL, 1));
  OK(cudaEventSynchronize(event));
}

TEST(a_signal_on_a_destroyed_stream_leaves_the_communicator_usable) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, 1, id, 0));
  cudaStream_t stream;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  OK(cudaStreamDestroy(stream));
  EXPECT(ncclSignal(0, 0, 0, 0, comm, stream) == ncclInvalidArgument);
  EXPECT_IN("a stream that was destroyed", ncclGetLastError(comm));
  OK(ncclCommDestroy(comm));
  EXPECT(hw_cpu_failed() == 0);
}

TEST(a_captured_stream_cannot_be_destroyed) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Stream stream;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT(cudaStreamDestroy(stream) == cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  EXPECT(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
}

TEST(the_end_of_a_communicator_orders_its_work_before_later_work) {
  on_ranks(2, [](int rank) {
    static ncclUniqueId ids[2];
    const Stream streams[2];
    const Buffer x(4);
    for (int i = 0; i < 2; ++i) {
      if (rank == 0) OK(ncclGetUniqueId(&ids[i]));
      EXPECT(hw_cpu_barrier(2) == 0);
      const Comm comm(ids[i], 2, rank);
      OK(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, streams[i]));
    }
    OK(cudaDeviceSynchronize());
  });
}

TEST(a_put_that_waits_during_a_failure_moves_nothing) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.processes = 1;
  configure(config);
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  const Comm comm(id, 1, 0);
  const Stream stream;
  void* memory = nullptr;
  OK(ncclMemAlloc(&memory, 2));
  auto* const bytes = static_cast<std::atomic<char>*>(memory);
  ncclWindow_t window;
  OK(ncclCommWindowRegister(comm, memory, 2, &window, NCCL_WIN_COLL_SYMMETRIC));
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  OK(ncclPutSignal(bytes, 1, ncclInt8, 0, window, 1, 0, 0, 0, comm, stream));
  cudaGraph_t graph;
  OK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t put;
  OK(cudaGraphInstantiateWithFlags(&put, graph, 0));
  bytes[0] = 1;
  OK(cudaGraphLaunch(put, stream));
  OK(cudaStreamSynchronize(stream));
  bytes[0] = 2;
  OK(cudaGraphLaunch(put, stream));  // The put waits, because nothing has consumed its last signal.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  hw_cpu_abort("a test");
  hw_cpu_detach();
  const char put_last = bytes[1];
  OK(cudaGraphExecDestroy(put));
  OK(cudaGraphDestroy(graph));
  OK(ncclCommWindowDeregister(comm, window));
  OK(ncclMemFree(memory));
  EXPECT(put_last == 1);
}

TEST(the_reason_why_processes_cannot_share_memory) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.processes = 1;
  configure(config);
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  const rlimit none{0, files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  setrlimit(RLIMIT_NOFILE, &files);
  EXPECT(result == ncclSystemError);
  EXPECT_IN("processes cannot share memory: Too many open files", ncclGetLastError(nullptr));
}

TEST(averages_of_bytes_of_many_ranks) {
  constexpr int kMany = 256;  // exceeds a signed byte
  configure(config_of(HW_CPU_PARALLEL, kMany));
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  const std::string error = run_ranks(kMany, [&](int r) {
    const Comm comm(id, kMany, r);
    const Buffer<signed char> x(1);
    OK(cudaMemset(x, r < 2 ? 60 : 0, 1));
    OK(ncclAllReduce(x, x, 1, ncclInt8, ncclAvg, comm, nullptr));
    EXPECT(fetch<signed char>(x, 1, nullptr).front() == 0);
  });
  if (!error.empty()) throw Failure(error);
}
