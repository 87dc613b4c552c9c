#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/driver_function.h"
#include "hostweave/errors.h"
#include "hostweave/peer.h"
#include "target.h"

namespace hw::target {

namespace {

int count_devices() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) throw ExecutionError(std::string("no GPU can be used: ") + cudaGetErrorString(error));
  return devices;
}

// State of a communicator that a thread is creating.
struct Making {
  std::mutex mutex;
  std::condition_variable changed;
  ncclComm_t comm = nullptr;
  ncclResult_t result = ncclInProgress;
  bool given_up = false;
};

ncclResult_t make(ncclComm_t* comm, const ProcessGroup& process_group, const ncclUniqueId& id) {
  const int ranks = static_cast<int>(process_group.size), rank = static_cast<int>(process_group.rank_in_group);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
  if (process_group.transport == Transport::one_sided) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.numRmaSig = PeerGroup::kNumbers;
    config.rmaEagerInit = 1;                        // initialises one-sided calls when the communicator is created
    config.nvlsHostMode = ncclNvlsHostModeDisable;  // copy engines move the data
    return ncclCommInitRankConfig(comm, ranks, id, rank, &config);
  }
#endif
  return ncclCommInitRank(comm, ranks, id, rank);
}

}  // namespace

void configure(const Schedule& schedule, int ranks) {
  if (schedule.seeded) throw ExecutionError("seeded schedules exist on the CPU target only");
  const int devices = count_devices();
  if (devices < ranks) {
    throw ExecutionError("the program needs " + std::to_string(ranks) + (ranks == 1 ? " GPU" : " GPUs") +
                         " and this machine has " + std::to_string(devices) + "; compile it for a smaller mesh, or for the CPU");
  }
}

Attached::Attached(int) {}

Attached::~Attached() = default;

void meet(int) {}

bool synchronize(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state == cudaErrorNotReady) {
    std::this_thread::yield();
    return false;
  }
  HW_CHECK(state);
  return true;
}

std::string report() { return ""; }

void stop(const std::string&) {}

const bool kOneParty = false;
const bool kCopiesBlock = true;

bool is_set_up(int device) {
  using GetState = int(int device, unsigned* flags, int* active);
  static auto* const get = driver_function<GetState>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  return get && get(device, &flags, &active) == 0 && active;
}

int device_for(int64_t, int64_t local) { return static_cast<int>(local % count_devices()); }

// The initialisation of NCCL waits for the other ranks without a timeout. So a background thread runs the initialisation. After a
// timeout or an abort, the caller does not wait for that thread.
ncclComm_t make_channel(const ProcessGroup& process_group, const ncclUniqueId& id, int device, double timeout_seconds,
                        const std::atomic<bool>& aborted) {
  const auto making = std::make_shared<Making>();
  in_background([=] {
    ncclComm_t comm = nullptr;
    ncclResult_t result = cudaSetDevice(device) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
    if (result == ncclSuccess) result = make(&comm, process_group, id);
    const std::lock_guard lock(making->mutex);
    making->comm = comm;
    making->result = result;
    making->changed.notify_all();
    if (making->given_up && result == ncclSuccess) ncclCommAbort(comm);
  });
  std::unique_lock lock(making->mutex);
  const auto done = [&] { return making->result != ncclInProgress; };
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  while (!making->changed.wait_for(lock, std::chrono::milliseconds(50), done)) {
    if (!aborted && std::chrono::steady_clock::now() < end) continue;
    making->given_up = true;
    if (aborted) throw ExecutionError("the group has failed; call hw.init again");
    throw ExecutionError("the channel of " + process_group.key + " was not made within " +
                         std::to_string(std::lround(timeout_seconds)) + " seconds; NCCL_DEBUG=INFO says what NCCL waits for");
  }
  const ncclResult_t ncclCommInitRank = making->result;
  HW_CHECK(ncclCommInitRank);
  find_signals(making->comm, process_group);
  return making->comm;
}

void finish() {}

}  // namespace hw::target

namespace hw {
namespace {

using WaitValue = int(cudaStream_t stream, uint64_t address, uint32_t value, unsigned flags);

// cuStreamWaitValue32 with flags = 0: waits until the value at an address is at least `value`.
WaitValue* wait_value() {
  static auto* const wait = driver_function<WaitValue>("cuStreamWaitValue32_v2");
  return wait;
}

}  // namespace

Gate::Gate(int ranks) : ranks_(ranks) {
  if (!wait_value()) return;
  HW_CHECK(cudaMallocHost(reinterpret_cast<void**>(&opened_), sizeof *opened_));  // accessible from all devices
  open(0);
}

Gate::~Gate() {
  if (opened_) (void)cudaFreeHost(opened_);
}

void Gate::hold(cudaStream_t stream, uint32_t round) const {
  if (!opened_ || round == 0) return;  // The host may wait for the device in the first call, for example to set up channels.
  const int error = wait_value()(stream, reinterpret_cast<uint64_t>(opened_), round, 0);
  if (error)
    throw ExecutionError("measure: cuStreamWaitValue32 has failed with error " + std::to_string(error) + " of the driver");
}

void Gate::open(uint32_t round) const {
  if (opened_) __atomic_store_n(opened_, round, __ATOMIC_RELEASE);
}

}  // namespace hw
