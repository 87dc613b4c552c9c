#include "hostweave/window.h"

#if !defined(HOSTWEAVE_CPU_DEVICE) && NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0) && __has_include(<nccl_device/host.h>)
#include <nccl_device/host.h>
#define HOSTWEAVE_ASKS_NCCL
extern "C" ncclResult_t ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t*) __attribute__((weak));
#endif

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hostweave/background.h"
#include "hostweave/check.h"
#include "hostweave/device_memory.h"
#include "hostweave/errors.h"
#include "hostweave/reach.h"
#include "hostweave/streams.h"
#include "hostweave/term_exchange.h"

namespace hw {
namespace {

// State shared by all programs of a rank that use a channel's windows.
struct WindowUsers {
  CallOrder calls;                    // Signals are counted per channel, so calls must be ordered.
  std::atomic<bool> aborted = false;  // true if the communicator and its windows are gone
};

std::mutex users_mutex;
auto& all_users() { return immortal<std::map<const void*, std::weak_ptr<WindowUsers>>>(); }  // guarded by users_mutex

std::shared_ptr<WindowUsers> users_of(const Channel& channel) {
  const std::lock_guard lock(users_mutex);
  std::weak_ptr<WindowUsers>& known = all_users()[channel.key()];
  std::shared_ptr<WindowUsers> users = known.lock();
  if (!users || users->aborted) known = users = std::make_shared<WindowUsers>();
  return users;
}

#ifndef HOSTWEAVE_CPU_DEVICE
int loaded_nccl() {
  int version = 0;
  HW_CHECK(ncclGetVersion(&version));
  return version;
}

[[noreturn]] void too_old(const std::string& needed) {
  const int version = loaded_nccl();
  throw ExecutionError("transport one_sided needs " + needed + ", but the loaded version is " + std::to_string(version / 10000) +
                       "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100) +
                       "; load a later version, or compile with transport=\"two_sided\"");
}
#endif

}  // namespace

void expect_one_sided_calls() {
#ifndef HOSTWEAVE_CPU_DEVICE
  if (!::ncclPutSignal || !::ncclSignal || !ncclWaitSignal || !ncclGetPeerDevicePointer) too_old("NCCL 2.29 or later");
#endif
}

struct WindowArena::Windows {
  struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    std::vector<Registered> registered;  // by channel
  };

  explicit Windows(std::initializer_list<const Channel*> channels) {
    std::ranges::copy_if(channels, std::back_inserter(channels_), [](const Channel* channel) { return channel->size() > 0; });
    for (const Channel* channel : channels_) users_.push_back(users_of(*channel));
  }

  ~Windows() {
    try {
      if (is_aborted()) {
        new DeviceMemory(std::move(rest_));
        new std::vector<DeviceMemory>(std::move(rest_of_graphs_));
      }
      for (Memory& outgrown : of_graphs_) release(std::move(outgrown));
      release(std::move(memory_));
    } catch (const std::exception&) {
      // A destructor must not throw, so the memory stays allocated.
    }
  }

  void reserve(MemoryPlan& plan) {
    const MemoryPlan::Bytes needed = plan.place();
    const size_t total = whole_pieces(needed.in_windows);
    const bool in_graphs = std::ranges::any_of(users_, [](const auto& users) { return users->calls.in_graphs(); });
    if (total > memory_.bytes) {
      for (const Channel* channel : channels_) {
        if (channel->peers() && !by_peers())
          throw ExecutionError("a program cannot combine the transports one_sided and peer; compile it for one of them");
        if (const std::string why = why_out_of_reach(*channel); !why.empty())
          throw ExecutionError("peers cannot write to this rank's memory: " + why + "; compile with transport=\"two_sided\"");
      }
      Memory old = std::exchange(memory_, {});
      if (in_graphs)
        of_graphs_.push_back(std::move(old));
      else
        release(std::move(old));
      memory_.data = allocate_window(channels_.empty() ? nullptr : channels_.front(), total);
      memory_.registered.resize(channels_.size());
      for (size_t channel = 0; channel < channels_.size(); ++channel)
        register_window(*channels_[channel], memory_.data, total, memory_.registered[channel]);
      memory_.bytes = total;
    }
    if (needed.elsewhere > rest_.bytes() && in_graphs) rest_of_graphs_.push_back(std::exchange(rest_, {}));
    plan.set_pointers(rest_.reserve(needed.elsewhere), memory_.data);
  }

  const Registered& registered(const Channel& channel) const {
    const auto found = std::ranges::find(channels_, &channel);
    if (found == channels_.end()) throw ExecutionError("the windows of the program are not registered with this channel");
    return memory_.registered[found - channels_.begin()];
  }

  // Earlier calls enqueued waits for the last signals of the peers. After these waits, peers no longer access `memory`.
  void release(Memory memory) const {
    if (!memory.data || is_aborted()) return;
    HW_CHECK(cudaDeviceSynchronize());
    if (is_aborted()) return;  // The abort ended the waits.
    release_window(memory.data, memory.registered);
  }

  // True if the channels use transport `peer`.
  bool by_peers() const {
    return std::ranges::all_of(channels_, [](const Channel* channel) { return channel->peers() != nullptr; });
  }

  // True if an abort may have left a stream that waits for a peer forever. Memory cannot be freed then. On the CPU device, no
  // stream waits after an abort. While an abort waits for running work, cudaDeviceSynchronize fails there.
  bool is_aborted() const {
#ifdef HOSTWEAVE_CPU_DEVICE
    return false;
#else
    return std::ranges::any_of(users_, [](const auto& users) { return users->aborted.load(); }) ||
           std::ranges::any_of(channels_,
                               [](const Channel* channel) { return channel->peers() && channel->peers()->is_stuck(); });
#endif
  }

  std::vector<const Channel*> channels_;             // only channels whose process group contains this rank
  std::vector<std::shared_ptr<WindowUsers>> users_;  // one per channel
  Memory memory_;
  DeviceMemory rest_;              // memory that peers do not access
  std::vector<Memory> of_graphs_;  // outgrown memory that graphs may use
  std::vector<DeviceMemory> rest_of_graphs_;
};

WindowArena::WindowArena(std::initializer_list<const Channel*> channels) : windows_(channels) {}

void WindowArena::reserve(MemoryPlan& plan) { windows_->reserve(plan); }

void* allocate_window(const Channel* channel, size_t bytes) {
  if (channel && channel->peers()) return channel->peers()->allocate(bytes);
  if (channel) expect_one_sided_calls();
  void* data = nullptr;
  HW_CHECK(ncclMemAlloc(&data, bytes));
  return data;
}

void register_window(const Channel& channel, void* data, size_t bytes, Registered& made) {
  made.channel = &channel;
  if (channel.peers()) {
    channel.peers()->map(data, bytes, made.mapping);
    made.peers = made.mapping.begins;
    return;
  }
  HW_CHECK(ncclCommWindowRegister(channel.comm(), data, bytes, &made.window, NCCL_WIN_COLL_SYMMETRIC));
  if (!made.window) {
    throw ExecutionError("NCCL cannot register windows (NCCL_DEBUG=INFO shows the reason); compile with transport=\"two_sided\"");
  }
  made.peers.assign(channel.size(), static_cast<char*>(data));
  for (int64_t peer = 0; peer < channel.size(); ++peer) {
    if (peer == channel.rank()) continue;
    void* base = nullptr;
    HW_CHECK(ncclGetPeerDevicePointer(made.window, 0, static_cast<int>(peer), &base));
    if (!base) {
      throw ExecutionError(
          "this rank cannot reach the memory of rank " + std::to_string(peer) +
          " of the channel: that rank is on another host or has no peer access; compile with transport=\"two_sided\"");
    }
    made.peers[peer] = static_cast<char*>(base);
  }
}

void release_window(void* data, const std::vector<Registered>& registered) {
  std::vector<PeerGroup::Mapping> mappings;
  bool by_peers = false;
  for (const Registered& one : registered) {
    by_peers = by_peers || (one.channel && one.channel->peers());
    if (one.mapping.group) mappings.push_back(one.mapping);
    if (one.window) HW_CHECK(ncclCommWindowDeregister(one.channel->comm(), one.window));
  }
  if (by_peers)
    PeerGroup::free(data, mappings);
  else
    HW_CHECK(ncclMemFree(data));
}

std::string why_out_of_reach(const Channel& channel) {
  if (channel.peers()) return channel.peers()->why_out_of_reach();
#ifdef HOSTWEAVE_ASKS_NCCL
  if (!channel.size() || !ncclCommQueryProperties) return "";
  ncclCommProperties_t properties{};
  properties.size = sizeof properties;
  properties.magic = NCCL_API_MAGIC;
  properties.version = NCCL_VERSION_CODE;
  HW_CHECK(ncclCommQueryProperties(channel.comm(), &properties));
  if (properties.nLsaTeams > 1) {
    return "the ranks are on several hosts or have no peer access: NCCL finds " + std::to_string(properties.nLsaTeams) +
           " sets of ranks that reach each other's memory";
  }
  if (!properties.hostRmaSupport) return "NCCL has no one-sided calls for this communicator (NCCL_DEBUG=INFO says why)";
#else
  (void)channel;
#endif
  return "";
}

std::string why_no_windows(const Channel& channel) {
  if (channel.peers()) return "";  // The ranks of the channel tested access when they connected.
  void* const data = allocate_window(&channel, kPiece);
  std::string why;
  Registered made;
  try {
    register_window(channel, data, kPiece, made);
  } catch (const ExecutionError& error) {
    why = error.what();
  }
  release_window(data, {made});
  return why;
}

size_t WindowArena::offset(const void* address) const {
  const auto offset = static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(windows_->memory_.data));
  if (offset > windows_->memory_.bytes) throw ExecutionError("peers cannot reach memory outside of windows: use allocate_window");
  return offset;
}

cudaError_t WindowArena::begin_call(cudaStream_t caller) const {
  for (const auto& users : windows_->users_) {
    if (const cudaError_t error = users->calls.begin_call(caller)) return error;
#ifndef HOSTWEAVE_CPU_DEVICE
    // Before NCCL 2.30.7, a captured wait waits for a fixed count. So the wait would end too early at the second launch.
    if (users->calls.capturing() && !windows_->by_peers() && loaded_nccl() < NCCL_VERSION(2, 30, 7))
      too_old("NCCL 2.30.7 or later in a CUDA graph");
#endif
  }
  return cudaSuccess;
}

cudaError_t WindowArena::end_call(cudaStream_t caller) const {
  for (const auto& users : windows_->users_) {
    if (const cudaError_t error = users->calls.end_call(caller)) return error;
  }
  return cudaSuccess;
}

ncclWindow_t WindowArena::window(const Channel& channel) const { return windows_->registered(channel).window; }

void* WindowArena::address_on_peer(const Channel& channel, int64_t peer, const void* address) const {
  const auto* const at = static_cast<const char*>(address);
  const auto* const begin = static_cast<const char*>(windows_->memory_.data);
  const bool is_own = at >= begin && at < begin + windows_->memory_.bytes;
  if (char* const shared = is_own ? nullptr : channel.on_peer(peer, at)) return shared;
  return windows_->registered(channel).peers[peer] + offset(address);
}

void* WindowArena::part(size_t number, size_t* bytes) const {
  const Windows::Memory& memory = windows_->memory_;
  const DeviceMemory& rest = windows_->rest_;
  for (const auto& [data, size] : {std::pair(memory.data, memory.bytes), std::pair(rest.data(), rest.bytes())}) {
    if (size == 0 || number-- != 0) continue;
    *bytes = size;
    return data;
  }
  return nullptr;
}

void abort_with_windows(const std::vector<ncclComm_t>& comms) {
  for (const ncclComm_t comm : comms) {
    abort_exchanges(comm);
    const std::lock_guard lock(users_mutex);
    if (const auto found = all_users().find(comm); found != all_users().end()) {
      if (const auto users = found->second.lock()) users->aborted = true;
      all_users().erase(found);
    }
  }
  // Aborts communicators in parallel. NCCL waits for the graphs of a communicator, and these graphs may wait for other
  // communicators.
  int device = 0;
  (void)cudaGetDevice(&device);
  std::vector<std::jthread> aborts;
  for (const ncclComm_t comm : comms) {
    aborts.emplace_back([comm, device] {
      cudaSetDevice(device);
      ncclCommAbort(comm);
    });
  }
}

}  // namespace hw
