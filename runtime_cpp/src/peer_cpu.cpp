// Peer memory on the CPU device, by its windows and binary signals (hw_cpu_set_signal).
#include <hostweave_cpu.h>

#include <atomic>

#include "hostweave/check.h"
#include "hostweave/peer.h"
#include "hostweave/reach.h"

namespace hw {

struct PeerGroup::State {
  ncclComm_t comm = nullptr;
  int64_t size = 0;
  std::atomic<bool> aborted = false;
  std::string out_of_reach;
};

ncclUniqueId PeerGroup::new_id() {
  ncclUniqueId id;
  HW_CHECK(ncclGetUniqueId(&id));
  return id;
}

PeerGroup::PeerGroup(const ncclUniqueId& id, int64_t rank, int64_t size, double, const std::atomic<bool>*)
    : state_(std::make_shared<State>()) {
  state_->size = size;
  HW_CHECK(ncclCommInitRank(&state_->comm, static_cast<int>(size), id, static_cast<int>(rank)));
}

PeerGroup::~PeerGroup() {
  if (!state_->aborted) ncclCommDestroy(state_->comm);
}

const std::string& PeerGroup::why_out_of_reach() const { return state_->out_of_reach; }

void* PeerGroup::allocate(size_t bytes) {
  void* data = nullptr;
  HW_CHECK(ncclMemAlloc(&data, bytes));
  return data;
}

void PeerGroup::map(void* data, size_t bytes, Mapping& mapping) {
  mapping.group = this;
  ncclWindow_t window = nullptr;
  HW_CHECK(ncclCommWindowRegister(state_->comm, data, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
  mapping.handle = window;
  for (int peer = 0; peer < state_->size; ++peer) {
    void* base = nullptr;
    HW_CHECK(ncclGetPeerDevicePointer(window, 0, peer, &base));
    mapping.begins.push_back(static_cast<char*>(base));
  }
}

void PeerGroup::free(void* data, const std::vector<Mapping>& mappings) {
  for (const Mapping& mapping : mappings) {
    if (auto* const window = static_cast<ncclWindow_t>(mapping.handle))
      HW_CHECK(ncclCommWindowDeregister(mapping.group->state_->comm, window));
  }
  if (data) HW_CHECK(ncclMemFree(data));
}

cudaError_t PeerGroup::signal(int64_t peer, int number, cudaStream_t stream) {
  const bool done = hw_cpu_set_signal(state_->comm, static_cast<int>(peer), number, stream) == ncclSuccess;
  return done ? cudaSuccess : cudaErrorUnknown;  // The report of the device has the reason.
}

cudaError_t PeerGroup::wait_signal(int64_t peer, int number, cudaStream_t stream) {
  const bool done = hw_cpu_take_signal(state_->comm, static_cast<int>(peer), number, stream) == ncclSuccess;
  return done ? cudaSuccess : cudaErrorUnknown;
}

void PeerGroup::abort() {
  if (state_->aborted.exchange(true)) return;
  ncclCommAbort(state_->comm);
}

bool PeerGroup::is_stuck() const { return false; }  // While an abort waits for running work, cudaDeviceSynchronize fails.

}  // namespace hw
