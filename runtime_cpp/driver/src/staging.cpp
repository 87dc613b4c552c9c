#include "hostweave/staging.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hostweave/check.h"
#include "target.h"

namespace hw {
namespace {

// Empty arrays also get memory.
size_t at_least_one(size_t bytes) { return std::max<size_t>(bytes, 1); }

// Enables direct copies from GPU `peer` if the machine supports them. Otherwise, copies pass through host memory.
void see(int device, int peer) {
  int can = 0;
  HW_CHECK(cudaDeviceCanAccessPeer(&can, device, peer));
  if (!can) return;
  const cudaError_t cudaDeviceEnablePeerAccess = ::cudaDeviceEnablePeerAccess(peer, 0);
  if (cudaDeviceEnablePeerAccess == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // An earlier call, NCCL or the application has already enabled access.
  } else {
    HW_CHECK(cudaDeviceEnablePeerAccess);
  }
}

}  // namespace

Staging::Staging(Member& member) : member_(member) {
  const Member::Use use(member_);
  HW_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Staging::~Staging() {
  try {
    const Member::Use use(member_, true);
    inputs_.clear();
    outputs_.clear();
    fetched_.clear();
    cudaStreamDestroy(stream_);
  } catch (const std::exception&) {
    // A destructor must not throw, so the stream stays. The destructors of the members still free their memory.
  }
}

void Staging::place(std::vector<Call> calls) {
  const Member::Use use(member_);
  calls_ = std::move(calls);
  fetched_.resize(calls_.size());
  for (size_t i = 0; i < calls_.size(); ++i) {
    Call& call = calls_[i];
    fetch(call.inputs, fetched_[i]);
    const std::vector<void*> inputs = addresses(inputs_, call.inputs);
    call.placed_inputs.bound.assign(inputs.begin(), inputs.end());
    call.placed_outputs = addresses(outputs_, call.outputs);
  }
}

// Copies the inputs of a call that are on other GPUs to the GPU of this rank.
//
// All ranks fetch before any call, because copies between calls could deadlock. A copy between two GPUs may occupy queues of both
// GPUs. On rank A, the copy for call 2 waits for call 1 of rank A. If this copy precedes rank B's copy for call 1 in a queue
// of GPU B, rank B never starts call 1. Then the collectives of call 1 never end.
void Staging::fetch(std::vector<Array>& inputs, std::vector<DeviceMemory>& fetched) const {
  fetched.resize(inputs.size());
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Array& input = inputs[i];
    if (input.device < 0 || input.device == member_.device()) continue;
    see(member_.device(), input.device);
    void* const here = fetched[i].reserve(at_least_one(input.bytes));
    copy(here, input.data, input, cudaMemcpyDefault);
    input.data = here;
    input.device = member_.device();
    any = true;
  }
  if (any) HW_CHECK(cudaStreamSynchronize(stream_));
}

// Device address of each array. Uses the array itself if it is on this device and aligned to 16 bytes, and otherwise an address
// in `memory`.
std::vector<void*> Staging::addresses(std::vector<DeviceMemory>& memory, const std::vector<Array>& arrays) const {
  memory.resize(arrays.size());
  std::vector<void*> addresses;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array& array = arrays[i];
    const bool in_place = array.device == member_.device() && reinterpret_cast<uintptr_t>(array.data) % 16 == 0;
    addresses.push_back(in_place ? array.data : memory[i].reserve(at_least_one(array.bytes)));
  }
  return addresses;
}

void Staging::copy(void* dst, const void* src, const Array& array, cudaMemcpyKind host_kind) const {
  if (dst == src || array.bytes == 0) return;
  HW_CHECK(cudaMemcpyAsync(dst, src, array.bytes, array.device < 0 ? host_kind : cudaMemcpyDefault, stream_));
}

void Staging::upload(const Call& call) const {
  for (size_t i = 0; i < call.inputs.size(); ++i)
    copy(*call.placed_inputs.bound[i], call.inputs[i].data, call.inputs[i], cudaMemcpyHostToDevice);
}

void Staging::download(const Call& call) const {
  const bool blocks =
      target::kCopiesBlock && std::ranges::any_of(call.outputs, [](const Array& array) { return array.device < 0; });
  if (blocks) member_.synchronize(stream_);  // Throws if the ranks are stopped. A blocking copy would not return then.
  for (size_t i = 0; i < call.outputs.size(); ++i)
    copy(call.outputs[i].data, call.placed_outputs[i], call.outputs[i], cudaMemcpyDeviceToHost);
}

}  // namespace hw
