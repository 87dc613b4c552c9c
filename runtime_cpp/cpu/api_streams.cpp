// CUDA calls for devices, peer access, streams and events. Functions that submit ops and wait for ops.
#include <algorithm>

#include "capture.h"
#include "errors.h"
#include "machine.h"

using namespace hostweave::cpu;

namespace hostweave::cpu {

static cudaError_t no_such(const char* what, const char* call) {
  return error(cudaErrorInvalidResourceHandle,
               std::string(call) + ": " + what + " that was destroyed, or never made, is not supported by the CPU device");
}

cudaError_t no_such_stream(cudaStream_t stream, const char* call) {
  return stream == cudaStreamPerThread ? cuda_not_supported("the per-thread default stream") : no_such("a stream", call);
}

cudaError_t submit(Lock& lock, OpPtr op, cudaStream_t handle, bool peers_allowed) {
  Machine& machine = Machine::get();
  if (machine.failed()) return cuda_stopped();
  Stream* const stream = machine.find_stream(handle);
  if (!stream) return no_such_stream(handle, op->name.kind);
  if (const auto illegal = machine.illegal_access(op->ranges, stream->device, peers_allowed)) {
    return error(cudaErrorInvalidValue, std::string(op->name.kind) + ": " + *illegal);
  }
  const auto again = [op](Lock& lock, Stream& on) {
    Machine::get().enqueue(lock, std::make_shared<Op>(*op), on);
    return 0;
  };
  if (const auto added = stream->capture ? add_node(*stream, again) : std::nullopt) return *added;
  machine.enqueue(lock, std::move(op), *stream);
  return machine.failed() ? cuda_stopped() : cudaSuccess;
}

cudaError_t wait_for(Lock& lock, const std::vector<OpPtr>& ops, const std::string& what) {
  Machine& machine = Machine::get();
  const auto all_done = [&] { return std::ranges::all_of(ops, [](const OpPtr& op) { return op->done; }); };
  if (!machine.wait(lock, what, all_done)) return cuda_stopped();
  for (const OpPtr& op : ops) machine.learn(this_thread().device, op->clock);
  return cudaSuccess;
}

cudaError_t wait_for_device(Lock& lock, int device) {
  const cudaError_t result = wait_for(lock, Machine::get().tails(device), "a device");
  if (result == cudaSuccess) Machine::get().learn_retired(device);
  return result;
}

}  // namespace hostweave::cpu

namespace {

cudaError_t expect_device(const char* call, int device) {
  return expect_below(Machine::get().config.devices, "device", device, call, cudaErrorInvalidDevice);
}

Event* known(cudaEvent_t handle) {
  Event* const event = reinterpret_cast<Event*>(handle);
  return Machine::get().events.count(event) != 0 ? event : nullptr;
}

// Applies `answer` to the last op on a stream. Returns an error if the call is not possible.
template <class Answer>
cudaError_t asked(const char* call, cudaStream_t handle, const Answer& answer) {
  Call locked;
  if (Machine::get().failed()) return cuda_stopped();
  const Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, call);
  if (const auto illegal = forbidden_in_capture(call, *stream)) return *illegal;
  return answer(locked.lock, stream->last);
}

// Applies `answer` to the last record of an event. Returns an error if the call is not possible.
template <class Answer>
cudaError_t asked(const char* call, cudaEvent_t handle, const Answer& answer) {
  Call locked;
  if (Machine::get().failed()) return cuda_stopped();
  const Event* const event = known(handle);
  if (!event) return no_such("an event", call);
  if (event->capture) {
    event->capture->invalid = true;
    return error(cudaErrorCapturedEvent, std::string(call) + ": the event was last recorded in a capture");
  }
  if (const auto illegal = forbidden_in_capture(call)) return *illegal;
  return answer(locked.lock, event->record);
}

// Returns a function that waits for an op. For a null op, the function does nothing. `what` names the wait in reports.
auto end_of(const char* what) {
  return [what](Lock& lock, const OpPtr& op) { return op ? wait_for(lock, {op}, what) : cudaSuccess; };
}

// If the op is not done, lets other threads run, and then returns cudaErrorNotReady. So a loop that polls the op ends.
cudaError_t query(Lock& lock, const OpPtr op) {
  Machine& machine = Machine::get();
  if (op && !op->done) {
    machine.pause(lock);
    return machine.failed() ? cuda_stopped() : cudaErrorNotReady;
  }
  if (op) machine.learn(this_thread().device, op->clock);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  Call call;
  *count = Machine::get().config.devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Call call;
  if (const auto result = expect_device("cudaSetDevice", device)) return result;
  this_thread().device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = this_thread().device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  if (const auto illegal = forbidden_in_capture("cudaDeviceSynchronize")) return *illegal;
  return wait_for_device(call.lock, this_thread().device);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  Call call;
  if (const auto result = expect_device("cudaDeviceCanAccessPeer", device)) return result;
  if (const auto result = expect_device("cudaDeviceCanAccessPeer", peer)) return result;
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  Call call;
  const int device = this_thread().device;
  if (const auto result = expect_device("cudaDeviceEnablePeerAccess", peer)) return result;
  if (peer == device) return error(cudaErrorInvalidDevice, "cudaDeviceEnablePeerAccess: the device itself");
  if (flags != 0) return error(cudaErrorInvalidValue, "cudaDeviceEnablePeerAccess: flags must be 0");
  const bool fresh = Machine::get().peer_access.emplace(device, peer).second;
  return fresh ? cudaSuccess : error(cudaErrorPeerAccessAlreadyEnabled, "cudaDeviceEnablePeerAccess: already enabled");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags & ~static_cast<unsigned>(cudaStreamNonBlocking))
    return error(cudaErrorInvalidValue, "cudaStreamCreate: unknown flags");
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  if (Machine::get().fault("cudaStreamCreate")) return error(cudaErrorMemoryAllocation, "cudaStreamCreate: made to fail");
  *stream = reinterpret_cast<cudaStream_t>(Machine::get().create_stream(flags));
  return cudaSuccess;
}

// Ignores the priority, because CUDA guarantees no order by priority.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return error(cudaErrorInvalidResourceHandle, "cudaStreamDestroy: a default stream");
  }
  Call call;
  Stream* const stream = Machine::get().find_stream(handle);
  if (!stream) return no_such_stream(handle, "cudaStreamDestroy");
  if (const auto illegal = forbidden_in_capture("cudaStreamDestroy", *stream)) return *illegal;
  Machine::get().destroy_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return asked("cudaStreamSynchronize", stream, end_of("a stream")); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return asked("cudaStreamQuery", stream, query); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
  if (flags & ~static_cast<unsigned>(cudaEventWaitExternal)) return cuda_not_supported("cudaStreamWaitEvent with these flags");
  Call call;
  Event* const event = known(handle);
  if (!event) return no_such("an event", "cudaStreamWaitEvent");
  Stream* const on = Machine::get().find_stream(stream);
  if (!on) return no_such_stream(stream, "cudaStreamWaitEvent");
  if (const auto captured = capture_wait(*on, *event, flags == cudaEventWaitExternal)) return *captured;
  OpPtr op = new_op("wait", 1);
  // The wait is for the current record of the event, not for later records. Without a record, there is no wait.
  if (event->record) op->after.push_back(event->record);
  return submit(call.lock, std::move(op), stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void*) { return cuda_not_supported("cudaLaunchHostFunc"); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  if (flags & ~static_cast<unsigned>(cudaEventBlockingSync | cudaEventDisableTiming)) {
    return cuda_not_supported("an event with these flags");
  }
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  if (Machine::get().fault("cudaEventCreate")) return error(cudaErrorMemoryAllocation, "cudaEventCreate: made to fail");
  auto* const event = new Event{this_thread().device, !(flags & cudaEventDisableTiming), nullptr, nullptr};
  Machine::get().events.insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Call call;
  Event* const event = known(handle);
  if (!event) return no_such("an event", "cudaEventDestroy");
  Machine::get().events.erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  if (flags & ~static_cast<unsigned>(cudaEventRecordExternal)) return cuda_not_supported("cudaEventRecord with these flags");
  Call call;
  if (Machine::get().failed()) return cuda_stopped();  // The record would never end, and a later wait would hang.
  Event* const event = known(handle);
  if (!event) return no_such("an event", "cudaEventRecord");
  Stream* const on = Machine::get().find_stream(stream);
  if (!on) return no_such_stream(stream, "cudaEventRecord");
  if (on->device != event->device) {
    return error(cudaErrorInvalidResourceHandle, "cudaEventRecord: an event of device " + std::to_string(event->device) +
                                                     " on a stream of device " + std::to_string(on->device));
  }
  if (const auto captured = capture_record(*event, *on, flags == cudaEventRecordExternal)) return *captured;
  OpPtr op = new_op("record", 0);
  // Set the record before `submit`, because other threads may run before `submit` returns.
  event->record = op;
  return submit(call.lock, std::move(op), stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return asked("cudaEventSynchronize", event, end_of("an event")); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return asked("cudaEventQuery", event, query); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Call call;
  const Event *const a = known(start), *const b = known(end);
  if (!a || !b) return no_such("an event", "cudaEventElapsedTime");
  if (!a->timed || !b->timed) return error(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event without timing");
  if (!a->record || !b->record) return error(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event without record");
  if (!a->record->done || !b->record->done) return error(cudaErrorNotReady, "cudaEventElapsedTime: not recorded yet");
  *milliseconds = std::chrono::duration<float, std::milli>(b->record->finished - a->record->finished).count();
  return cudaSuccess;
}

}  // extern "C"
