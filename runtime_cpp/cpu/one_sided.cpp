// NCCL's one-sided calls: windows, puts, and counted signals.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capture.h"
#include "communicator.h"
#include "errors.h"
#include "machine.h"
#include "types.h"

struct ncclWindow_vidmem {
  std::shared_ptr<hostweave::cpu::Windows> windows;
  std::shared_ptr<hostweave::cpu::ProcessGroup> process_group;
};

namespace hostweave::cpu {
namespace {

constexpr int kSignals = SharedGroup::kSignals;  // signal numbers are less than this
// There are three ranges of counters: plain signals, acknowledged signals, and acknowledgements. An acknowledged signal waits
// until the previous signal was consumed.
constexpr int kInGraphs = kSignals, kTaken = 2 * kSignals;

ncclResult_t check(const std::string& call, ncclComm_t comm) {
  if (in_group()) return nccl_not_supported(call + " in a group");
  if (Machine::get().failed()) return nccl_stopped();
  return check_usable(call, comm);
}

ncclResult_t check(const std::string& call, ncclComm_t comm, int peer, int number, int context, unsigned flags) {
  if (const ncclResult_t result = check(call, comm)) return result;
  const int ranks = comm->process_group->size();
  if (const auto result = expect_below(ranks, "peer", peer, call, ncclInvalidArgument)) return result;
  if (const auto result = expect_below(kSignals, "signal", number, call, ncclInvalidArgument)) return result;
  if (context != 0 || flags != 0) return nccl_not_supported(call + " with a nonzero context or with flags");
  return ncclSuccess;
}

ncclResult_t add_window(ncclWindow_t* window, std::shared_ptr<Windows> windows, ncclComm_t comm) {
  *window = new ncclWindow_vidmem{std::move(windows), comm->process_group};
  Machine::get().windows.insert(*window);
  return ncclSuccess;
}

std::shared_ptr<SignalCount> count_of(ProcessGroup& process_group, int sender, int receiver, int number) {
  std::shared_ptr<SignalCount>& count = process_group.signals[{sender, receiver, number}];
  if (!count) {
    count = std::make_shared<SignalCount>();
    count->sender = process_group.devices[sender];
    count->number = number;
  }
  return count;
}

SignalTurn next_signal(ncclComm_t comm, int peer, int number) {
  auto count = count_of(*comm->process_group, comm->rank, peer, number);
  const std::uint64_t turn = ++count->given;
  return {std::move(count), turn};
}

std::string different_bytes(std::size_t theirs, int device, std::size_t ours) {
  return "mismatch: the sizes of a window differ: rank " + std::to_string(device) + " registers " + std::to_string(ours) +
         " bytes, and another rank " + std::to_string(theirs);
}

using Make = std::function<OpPtr(bool in_graph)>;

// Enqueues the op that `make` returns. In a capture, adds a node instead: each launch of the graph calls `make`, because the
// counts of signals differ.
ncclResult_t enqueue(Lock& lock, ncclComm_t comm, cudaStream_t handle, const Make& make, bool in_graph = false) {
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return error(ncclInvalidArgument, cudaGetErrorString(no_such_stream(handle, "a one-sided call")));
  const auto again = [comm, make, in_graph = comm->in_graphs](Lock& lock, Stream& on) {
    return static_cast<int>(enqueue(lock, comm, reinterpret_cast<cudaStream_t>(&on), make, true));
  };
  if (const auto added = stream->capture ? add_node(*stream, again) : std::nullopt)
    return *added == cudaSuccess ? ncclSuccess : error(ncclUnhandledCudaError, last_error_text());
  OpPtr op = make(in_graph);
  op->name.process_group = comm->process_group->name;
  comm->add(op);
  const cudaError_t result = submit(lock, std::move(op), handle, true);
  return result == cudaSuccess ? ncclSuccess : error(ncclInvalidArgument, cudaGetErrorString(result));
}

// Makes an op run its work and then send a signal.
void give_after(Op& op, ncclComm_t comm, int peer, int number, bool in_graph, std::function<void()> work) {
  const SignalTurn turn = next_signal(comm, peer, number + (in_graph ? kInGraphs : 0));
  const std::uint64_t before = turn.number - 1;
  if (!comm->process_group->shared) {
    op.work = std::move(work);
    op.gives = {turn};
    if (!in_graph) return;
    auto taken = count_of(*comm->process_group, peer, comm->rank, number + kTaken);
    taken->awaited = turn.number;
    op.awaits = {{std::move(taken), before}};
    return;
  }
  op.work = across_processes(comm->process_group->shared, [=](SharedGroup& shared) {
    if (in_graph && !shared.await_signals(peer, number + kTaken, before)) return;
    if (work) work();
    shared.give_signal(peer, number + (in_graph ? kInGraphs : 0));
  });
}

// Makes an op wait for signals of other processes. The counters of these signals are in shared memory.
void await_across_processes(Op& op, const ncclComm& comm, const std::vector<ncclWaitSignalDesc_t>& awaited, bool in_graph) {
  std::vector<std::uint64_t> turns;
  for (const SignalTurn& turn : std::exchange(op.awaits, {})) turns.push_back(turn.number);
  op.gives.clear();
  op.work = across_processes(comm.process_group->shared, [awaited, turns, in_graph](SharedGroup& shared) {
    for (std::size_t i = 0; i < turns.size(); ++i) {
      const auto& [count, peer, number, context] = awaited[i];
      if (!shared.await_signals(peer, number + (in_graph ? kInGraphs : 0), turns[i])) return;
      if (in_graph) shared.give_signal(peer, number + kTaken);
    }
  });
}

OpPtr signal_op(ncclComm_t comm, int peer, int number, bool acknowledged) {
  OpPtr op = new_op("signal", -1);
  give_after(*op, comm, peer, number, acknowledged, {});
  return op;
}

OpPtr wait_op(ncclComm_t comm, const std::vector<ncclWaitSignalDesc_t>& awaited, bool acknowledged) {
  OpPtr op = new_op("wait for signals", -1);
  ProcessGroup& process_group = *comm->process_group;
  for (const ncclWaitSignalDesc_t& signal : awaited) {
    auto count = count_of(process_group, signal.peer, comm->rank, signal.sigIdx + (acknowledged ? kInGraphs : 0));
    const std::uint64_t turn = count->awaited += signal.opCnt;
    op->awaits.push_back({std::move(count), turn});
    if (acknowledged) op->gives.push_back(next_signal(comm, signal.peer, signal.sigIdx + kTaken));
  }
  if (process_group.shared) await_across_processes(*op, *comm, awaited, acknowledged);
  return op;
}

// Description of a rank's registered memory, for the other ranks.
struct Registration {
  SharedFile file;
  std::uint64_t offset, bytes;
};

// For processes: shares the memory of this rank, and maps the memory of the other ranks. Returns null on failure. Sets `why`
// unless the machine has failed.
std::shared_ptr<Windows> register_across_processes(Lock& lock, ncclComm_t comm, char* memory, std::size_t bytes,
                                                   std::string& why) {
  Machine& machine = Machine::get();
  const auto shared = comm->process_group->shared;
  const int size = comm->process_group->size();
  const Allocation* const allocation = machine.memory.find(reinterpret_cast<std::uintptr_t>(memory));
  if (!allocation || allocation->file < 0) {
    why = "memory that ncclMemAlloc did not allocate";
    return nullptr;
  }
  const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(memory) - allocation->begin;
  const Registration ours{{getpid(), allocation->file}, offset, bytes};
  std::vector<Registration> all(size, ours);
  const auto handshake = [&] {
    lock.unlock();
    Traffic traffic(size);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == comm->rank) continue;
      traffic.send(peer, &ours, sizeof ours);
      traffic.receive(peer, &all[peer], sizeof ours);
    }
    shared->move(traffic);
    lock.lock();
    return !machine.failed();
  };
  wait_for_ops(lock, comm);  // Earlier ops use the same shared memory.
  if (!handshake()) return nullptr;
  auto windows = std::make_shared<Windows>();
  windows->bytes = bytes;
  for (int peer = 0; peer < size; ++peer) {
    const Registration& there = all[peer];
    if (there.bytes != bytes) {
      machine.fail(different_bytes(there.bytes, comm->device, bytes));
      return nullptr;
    }
    if (peer != comm->rank) windows->mappings.push_back(map_shared(there.file, there.offset + bytes));
    char* const mapped = peer == comm->rank ? memory - offset : windows->mappings.back().get();
    if (!mapped) why = "the memory of rank " + std::to_string(comm->process_group->devices[peer]) + " cannot be mapped";
    if (!mapped) return nullptr;
    windows->bases.push_back(mapped + there.offset);
  }
  if (!handshake()) return nullptr;  // Without this barrier, a rank could free memory that another rank still has to map.
  windows->arrived = size;
  return windows;
}

// True if these bytes are in a window that this rank registered with the process group.
bool in_window(ncclComm_t comm, const void* begin, std::size_t bytes) {
  const auto* const first = static_cast<const char*>(begin);
  return std::ranges::any_of(Machine::get().windows, [&](const ncclWindow_t window) {
    if (window->process_group != comm->process_group) return false;
    const char* const base = window->windows->bases[comm->rank];
    return first >= base && first + bytes <= base + window->windows->bytes;
  });
}

}  // namespace
}  // namespace hostweave::cpu

using namespace hostweave::cpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  const cudaError_t result = allocate_for_windows(pointer, bytes);
  return result == cudaSuccess ? ncclSuccess : error(ncclSystemError, cudaGetErrorString(result));
}

ncclResult_t ncclMemFree(void* pointer) {
  const cudaError_t result = cudaFree(pointer);
  return result == cudaSuccess ? ncclSuccess : error(ncclInvalidArgument, cudaGetErrorString(result));
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  Call call;
  if (const ncclResult_t result = check("ncclCommWindowRegister", comm)) return result;
  if (forbidden_in_capture("ncclCommWindowRegister")) return error(ncclUnhandledCudaError, last_error_text());
  if (flags != NCCL_WIN_COLL_SYMMETRIC)
    return nccl_not_supported("ncclCommWindowRegister with flags other than NCCL_WIN_COLL_SYMMETRIC");
  Machine& machine = Machine::get();
  ProcessGroup& process_group = *comm->process_group;
  if (process_group.shared) {
    std::string why;
    const auto windows = register_across_processes(call.lock, comm, static_cast<char*>(memory), bytes, why);
    if (machine.failed()) return nccl_stopped();
    if (!windows) return error(ncclInvalidArgument, "ncclCommWindowRegister: " + why);
    return add_window(window, windows, comm);
  }
  const int number = process_group.registered[comm->rank]++;
  std::shared_ptr<Windows>& slot = process_group.registrations[number];
  if (!slot) {
    slot = std::make_shared<Windows>();
    slot->bases.resize(process_group.size());
    slot->bytes = bytes;
  }
  const std::shared_ptr<Windows> windows = slot;
  if (windows->bytes != bytes) {
    machine.fail(different_bytes(windows->bytes, comm->device, bytes));
    return error(ncclInvalidUsage, machine.report());
  }
  windows->bases[comm->rank] = static_cast<char*>(memory);
  if (++windows->arrived == process_group.size()) process_group.registrations.erase(number);
  machine.progress();
  const std::string what = "all ranks of " + std::string(process_group.name) + " to register a window";
  if (!machine.wait(call.lock, what, [&] { return windows->arrived == process_group.size(); })) return nccl_stopped();
  return add_window(window, windows, comm);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) {
  Call call;
  if (Machine::get().windows.erase(window) == 0) return error(ncclInvalidArgument, "ncclCommWindowDeregister: no such window");
  delete window;
  return ncclSuccess;
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
  Call call;
  if (Machine::get().windows.count(window) == 0) return error(ncclInvalidArgument, "ncclGetPeerDevicePointer: no such window");
  const Windows& windows = *window->windows;
  if (peer < 0 || static_cast<size_t>(peer) >= windows.bases.size() || offset > windows.bytes) {
    return error(ncclInvalidArgument, "ncclGetPeerDevicePointer: no such memory");
  }
  *pointer = windows.bases[peer] + offset;
  return ncclSuccess;
}

ncclResult_t ncclPutSignal(const void* from, size_t count, ncclDataType_t type, int peer, ncclWindow_t window, size_t offset,
                           int number, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  Call call;
  if (const ncclResult_t result = check("ncclPutSignal", comm, peer, number, context, flags)) return result;
  const size_t bytes = count * type_size(type);
  if (Machine::get().windows.count(window) == 0 || window->process_group != comm->process_group) {
    return error(ncclInvalidArgument, "ncclPutSignal: not a window of the communicator");
  }
  if (offset + bytes > window->windows->bytes) {
    return error(ncclInvalidArgument, "ncclPutSignal: bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                                          " exceed the window, which has " + std::to_string(window->windows->bytes) + " bytes");
  }
  if (!in_window(comm, from, bytes)) return error(ncclInvalidArgument, "ncclPutSignal: the source is in no window of comm");
  char* const to = window->windows->bases[peer] + offset;
  return enqueue(call.lock, comm, stream, [=](bool in_graph) {
    OpPtr op = new_op("put", 0, {read_of(from, bytes), write_of(to, bytes)});
    give_after(*op, comm, peer, number, in_graph, [=] { copy_bytes(to, from, bytes); });
    return op;
  });
}

ncclResult_t ncclSignal(int peer, int number, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  Call call;
  if (const ncclResult_t result = check("ncclSignal", comm, peer, number, context, flags)) return result;
  return enqueue(call.lock, comm, stream, [=](bool in_graph) { return signal_op(comm, peer, number, in_graph); });
}

ncclResult_t ncclWaitSignal(int descriptors, ncclWaitSignalDesc_t* signals, ncclComm_t comm, cudaStream_t stream) {
  Call call;
  const std::vector<ncclWaitSignalDesc_t> awaited(signals, signals + descriptors);
  for (const ncclWaitSignalDesc_t& signal : awaited) {
    if (const ncclResult_t result = check("ncclWaitSignal", comm, signal.peer, signal.sigIdx, signal.ctx, 0)) return result;
    if (signal.opCnt != 1) return nccl_not_supported("ncclWaitSignal with an opCnt other than 1");
  }
  return enqueue(call.lock, comm, stream, [=](bool in_graph) { return wait_op(comm, awaited, in_graph); });
}

ncclResult_t hw_cpu_set_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream) {
  Call call;
  if (const ncclResult_t result = check("signal", comm, peer, number, 0, 0)) return result;
  return enqueue(call.lock, comm, stream, [=](bool) { return signal_op(comm, peer, number, true); });
}

ncclResult_t hw_cpu_take_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream) {
  Call call;
  if (const ncclResult_t result = check("wait_signal", comm, peer, number, 0, 0)) return result;
  return enqueue(call.lock, comm, stream, [=](bool) { return wait_op(comm, {{1, peer, number, 0}}, true); });
}

}  // extern "C"
