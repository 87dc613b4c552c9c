#include "hostweave/window.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"

namespace hw {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;  // bytes, of memory that GPUs map for each other

std::mutex users_mutex;

std::map<ncclComm_t, std::weak_ptr<WindowUsers>>& all_users() {  // guarded by users_mutex
  static auto* const users = new std::map<ncclComm_t, std::weak_ptr<WindowUsers>>;
  return *users;
}

std::shared_ptr<WindowUsers> users_of(ncclComm_t comm) {
  const std::lock_guard lock(users_mutex);
  std::weak_ptr<WindowUsers>& known = all_users()[comm];
  std::shared_ptr<WindowUsers> users = known.lock();
  if (!users || users->aborted) known = users = std::make_shared<WindowUsers>();
  return users;
}

// Throws ExecutionError where the NCCL that is loaded has no one-sided calls.
void expect_one_sided_calls() {
#ifndef HOSTWEAVE_CPU_DEVICE
  if (ncclPutSignal && ncclSignal && ncclWaitSignal && ncclGetPeerDevicePointer) return;
  int version = 0;
  HW_CHECK(ncclGetVersion(&version));
  throw ExecutionError("transport one_sided needs NCCL 2.29 or later, and the one that is loaded is " +
                       std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                       std::to_string(version % 100) + "; load a later one, or compile with transport=\"two_sided\"");
#endif
}

}  // namespace

WindowArena::WindowArena(std::initializer_list<const Channel*> channels) {
  for (const Channel* channel : channels)
    registered_.push_back({.channel = channel, .users = users_of(channel->comm()), .peers = {}});
}

WindowArena::~WindowArena() {
  try {
    release();
  } catch (const std::exception&) {
    // Nothing more can be done for a device that does not even free.
  }
}

void WindowArena::reserve(MemoryPlan& plan) {
  const size_t total = (plan.place() + kGranularity - 1) / kGranularity * kGranularity;
  if (total > bytes_) {
    expect_one_sided_calls();
    release();
    HW_CHECK(ncclMemAlloc(&data_, total));
    bytes_ = total;
    for (Registered& one : registered_) add(one);
  }
  plan.set_pointers(data_);
}

void WindowArena::add(Registered& one) {
  const Channel& channel = *one.channel;
  HW_CHECK(ncclCommWindowRegister(channel.comm(), data_, bytes_, &one.window, NCCL_WIN_COLL_SYMMETRIC));
  if (!one.window) {
    throw ExecutionError(
        "transport one_sided: NCCL registers no windows here (NCCL_DEBUG=INFO says why); compile with transport=\"two_sided\"");
  }
  one.peers.assign(channel.size(), static_cast<char*>(data_));
  for (int64_t peer = 0; peer < channel.size(); ++peer) {
    if (peer == channel.rank()) continue;
    void* base = nullptr;
    HW_CHECK(ncclGetPeerDevicePointer(one.window, 0, static_cast<int>(peer), &base));
    if (!base) {
      throw ExecutionError(
          "transport one_sided: this rank cannot reach the memory of rank " + std::to_string(peer) +
          " of the channel, which is on another host or has no peer access; compile with transport=\"two_sided\"");
    }
    one.peers[peer] = static_cast<char*>(base);
  }
}

// What peers do with this memory they have told by signals, which the calls have waited for.
void WindowArena::release() {
  if (!data_) return;
  // A stream may wait for ever for a rank that is gone, so that what it uses stays.
  if (std::ranges::any_of(registered_, [](const Registered& one) { return one.users->aborted; })) return;
  HW_CHECK(cudaDeviceSynchronize());
  for (Registered& one : registered_) {
    const ncclWindow_t window = std::exchange(one.window, nullptr);
    if (window) HW_CHECK(ncclCommWindowDeregister(one.channel->comm(), window));
  }
  bytes_ = 0;
  HW_CHECK(ncclMemFree(std::exchange(data_, nullptr)));
}

cudaError_t WindowArena::begin_call(cudaStream_t caller) {
  for (const Registered& one : registered_) {
    if (const cudaError_t error = cudaStreamWaitEvent(caller, one.users->last_call[0], 0)) return error;
  }
  return cudaSuccess;
}

cudaError_t WindowArena::end_call(cudaStream_t caller) {
  for (const Registered& one : registered_) {
    if (const cudaError_t error = cudaEventRecord(one.users->last_call[0], caller)) return error;
  }
  return cudaSuccess;
}

const WindowArena::Registered& WindowArena::registered(const Channel& channel) const {
  for (const Registered& one : registered_) {
    if (one.channel == &channel) return one;
  }
  throw ExecutionError("the channel is not one of those that the windows of the program are registered with");
}

ncclResult_t abort_with_windows(ncclComm_t comm) {
  {
    const std::lock_guard lock(users_mutex);
    if (const auto found = all_users().find(comm); found != all_users().end()) {
      if (const auto users = found->second.lock()) users->aborted = true;
      all_users().erase(found);
    }
  }
  return ncclCommAbort(comm);
}

}  // namespace hw
