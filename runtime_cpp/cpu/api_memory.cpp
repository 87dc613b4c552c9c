// CUDA calls for memory: allocations, copies and memsets.
#include <cstdint>
#include <cstring>

#include "capture.h"
#include "errors.h"
#include "machine.h"

using namespace hostweave::cpu;

namespace {

void forget(const void* pointer, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  Machine::get().history.forget(begin, begin + bytes);
}

const Allocation* around(const void* pointer) { return Machine::get().memory.find(reinterpret_cast<std::uintptr_t>(pointer)); }
bool is_pageable(const void* pointer) { return !around(pointer); }
bool is_device(const void* pointer) { return !is_pageable(pointer) && around(pointer)->device != kHost; }

cudaError_t allocate(void** pointer, std::size_t bytes, int device, const std::string& call, bool shared = false) {
  *pointer = nullptr;
  Machine& machine = Machine::get();
  if (machine.failed()) return cuda_stopped();
  if (const auto illegal = forbidden_in_capture(call.c_str())) return *illegal;
  if (machine.fault(call)) return error(cudaErrorMemoryAllocation, call + ": made to fail");
  if (bytes == 0) return cudaSuccess;
  *pointer = machine.memory.allocate(bytes, device, shared);
  if (!*pointer) return error(cudaErrorMemoryAllocation, call + ": no " + std::to_string(bytes) + " bytes left");
  forget(*pointer, bytes);  // Freed host memory may have had these addresses, so the history may contain older accesses.
  return cudaSuccess;
}

// Waits for all work of the device of the memory, and then frees the memory. For host memory, waits for the device of the calling
// thread. Does not wait for accesses by other devices.
cudaError_t release(void* pointer, bool is_host, const char* name) {
  if (!pointer) return cudaSuccess;
  Call call;
  Machine& machine = Machine::get();
  const Allocation* const allocation = around(pointer);
  if (!allocation || allocation->begin != reinterpret_cast<std::uintptr_t>(pointer))
    return error(cudaErrorInvalidValue, std::string(name) + ": not the beginning of an allocation");
  if ((allocation->device == kHost) != is_host) {
    const char* const why =
        is_host ? ": the memory is device memory; use cudaFree" : ": the memory is from cudaMallocHost; use cudaFreeHost";
    return error(cudaErrorInvalidValue, std::string(name) + why);
  }
  if (const auto illegal = forbidden_in_capture(name)) return *illegal;
  const Allocation what = *allocation;
  const int device = this_thread().device;
  if (!machine.failed()) wait_for_device(call.lock, is_host ? device : what.device);
  if (machine.failed()) {
    machine.wait_for_running_work(call.lock);
  } else if (machine.checking()) {
    auto clock = std::make_shared<Clock>(*machine.host_clock(device));
    const std::size_t actor = machine.host_actor(device);
    History::Access access{actor, clock->tick(actor), {what.device, 0, name, "", 0, this_thread().location}};
    machine.host_clock(device) = clock;
    if (const auto conflict = machine.history.note({write_of(pointer, what.bytes)}, access, *clock)) {
      machine.fail(machine.conflict_report(*conflict, access.name));
      return cuda_stopped();
    }
  }
  forget(pointer, what.bytes);
  machine.memory.release(pointer);
  return cudaSuccess;
}

struct Copy {
  void* dst;
  std::size_t dst_pitch;
  const void* src;
  std::size_t src_pitch;
  std::size_t width, height;
  cudaMemcpyKind kind;

  std::size_t bytes() const { return width * height; }
};

void move(const Copy& c) {
  if (c.height == 1) return copy_bytes(c.dst, c.src, c.width);
  for (std::size_t row = 0; row < c.height; ++row) {
    std::memcpy(static_cast<char*>(c.dst) + row * c.dst_pitch, static_cast<const char*>(c.src) + row * c.src_pitch, c.width);
  }
}

const char* wrong_direction(const Copy& c) {
  const bool to_host = c.kind == cudaMemcpyDeviceToHost || c.kind == cudaMemcpyHostToHost;
  const bool from_host = c.kind == cudaMemcpyHostToDevice || c.kind == cudaMemcpyHostToHost;
  if (c.kind < cudaMemcpyHostToHost || c.kind > cudaMemcpyDefault) return "an unknown direction";
  // Any memory is accepted for a device pointer, because a program may pass memory from malloc.
  if (to_host && is_device(c.dst)) return "the destination is device memory";
  if (from_host && is_device(c.src)) return "the source is device memory";
  return nullptr;
}

constexpr std::size_t kStaged = 64 << 10;  // CUDA stages up to this many bytes of pageable memory during the call

cudaError_t copy(const std::string& call_name, Copy c, cudaStream_t stream, bool blocks) {
  Call call;
  if (c.width == 0 || c.height == 0) c.width = c.height = 0;
  if (c.bytes() != 0) {
    if (!c.dst || !c.src) return error(cudaErrorInvalidValue, call_name + ": a null pointer");
    if (c.height > 1 && (c.width > c.dst_pitch || c.width > c.src_pitch)) {
      return error(cudaErrorInvalidPitchValue, call_name + ": the width is larger than a pitch");
    }
    if (const char* wrong = wrong_direction(c)) return error(cudaErrorInvalidMemcpyDirection, call_name + ": " + wrong);
  }
  const Range from = read_of(c.src, c.width, c.height, c.src_pitch), to = write_of(c.dst, c.width, c.height, c.dst_pitch);
  OpPtr op = new_op("copy", 0, {from, to});
  if (c.bytes() == 0) {
    op->ranges.clear();
  } else if (c.kind == cudaMemcpyHostToDevice && c.height == 1 && c.width <= kStaged && !blocks && is_pageable(c.src)) {
    const auto* const bytes = static_cast<const char*>(c.src);
    op->ranges = {to};
    op->work = [dst = c.dst, staged = std::vector<char>(bytes, bytes + c.width)] {
      std::memcpy(dst, staged.data(), staged.size());
    };
  } else {
    // Other copies between pageable memory and a device block until they are done, as in CUDA.
    blocks |= c.kind == cudaMemcpyHostToDevice && is_pageable(c.src);
    blocks |= c.kind == cudaMemcpyDeviceToHost && is_pageable(c.dst);
    op->work = [c] { move(c); };
  }
  const Stream* const on = Machine::get().find_stream(stream);
  const bool pageable = blocks || (c.kind == cudaMemcpyHostToDevice && c.bytes() != 0 && is_pageable(c.src));
  if (on && on->capture && pageable) return *forbidden_in_capture((call_name + " of pageable memory").c_str(), *on);
  if (c.kind == cudaMemcpyDeviceToDevice) Machine::get().copied_bytes += c.bytes();
  if (const cudaError_t result = submit(call.lock, op, stream, true)) return result;
  return blocks ? wait_for(call.lock, {op}, "a copy") : cudaSuccess;
}

}  // namespace

cudaError_t hostweave::cpu::allocate_for_windows(void** pointer, std::size_t bytes) {
  Call call;
  return allocate(pointer, bytes, this_thread().device, "cudaMalloc", Machine::get().processes());
}

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Call call;
  return allocate(pointer, bytes, this_thread().device, "cudaMalloc");
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  Call call;
  return allocate(pointer, bytes, kHost, "cudaMallocHost");
}
cudaError_t cudaFree(void* pointer) { return release(pointer, false, "cudaFree"); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, true, "cudaFreeHost"); }

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  // Like CUDA, does not block the host for a copy from device to device.
  return copy("cudaMemcpy", {dst, bytes, src, bytes, bytes, 1, kind}, nullptr, kind != cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpyAsync", {dst, bytes, src, bytes, bytes, 1, kind}, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpy2DAsync", {dst, dst_pitch, src, src_pitch, width, height, kind}, stream, false);
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  Call call;
  OpPtr op = new_op("fill", 0, {write_of(pointer, bytes)});
  if (bytes != 0) op->work = [=] { std::memset(pointer, value, bytes); };
  return submit(call.lock, std::move(op), stream);
}

}  // extern "C"
