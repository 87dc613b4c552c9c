#include "hostweave/staging.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/marks.h"
#include "hostweave/streams.h"
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

StagedCalls::StagedCalls(Instance& instance)
    : instance_(instance),
      nothing_bound_{std::vector<std::optional<void*>>(instance.inputs())},
      device_(instance.member().device()) {
  const Member::Use use(instance_.member());
  HW_CHECK(cudaStreamCreateWithFlags(&caller_, cudaStreamNonBlocking));
}

StagedCalls::~StagedCalls() {
  try {
    const Member::Use use(instance_.member(), true);
    inputs_.clear();
    outputs_.clear();
    fetched_.clear();
    cudaStreamDestroy(caller_);
  } catch (const std::exception&) {
    // A destructor must not throw, so the stream stays. The destructors of the members still free their memory.
  }
}

void StagedCalls::prepare(std::vector<Call> calls) {
  const Member::Use use(instance_.member());
  calls_ = std::move(calls);
  fetched_.resize(calls_.size());
  placed_.clear();
  for (size_t i = 0; i < calls_.size(); ++i) {
    fetch(i);
    placed_.push_back({place(inputs_, calls_[i].inputs), place(outputs_, calls_[i].outputs)});
  }
}

// Copies the inputs of a call that are on other GPUs to the GPU of this rank.
//
// All ranks fetch before any call, because copies between calls could deadlock. A copy between two GPUs may occupy queues of both
// GPUs. On rank A, the copy for call 2 waits for call 1 of rank A. If this copy precedes rank B's copy for call 1 in a queue
// of GPU B, rank B never starts call 1. Then the collectives of call 1 never end.
void StagedCalls::fetch(size_t call) {
  std::vector<Array>& inputs = calls_[call].inputs;
  fetched_[call].resize(inputs.size());
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Array& input = inputs[i];
    if (input.device < 0 || input.device == device_) continue;
    see(device_, input.device);
    void* const here = fetched_[call][i].reserve(at_least_one(input.bytes));
    copy(here, input.data, input, cudaMemcpyDefault);
    input.data = here;
    input.device = device_;
    any = true;
  }
  if (any) HW_CHECK(cudaStreamSynchronize(caller_));
}

// Device address of each array. Uses the array itself if it is on this device and aligned to 16 bytes, and otherwise an address
// in `staging`.
std::vector<void*> StagedCalls::place(std::vector<DeviceMemory>& staging, const std::vector<Array>& arrays) const {
  staging.resize(arrays.size());
  std::vector<void*> placed;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array& array = arrays[i];
    const bool in_place = array.device == device_ && reinterpret_cast<uintptr_t>(array.data) % 16 == 0;
    placed.push_back(in_place ? array.data : staging[i].reserve(at_least_one(array.bytes)));
  }
  return placed;
}

void StagedCalls::copy(void* dst, const void* src, const Array& array, cudaMemcpyKind host_kind) const {
  if (dst == src || array.bytes == 0) return;
  HW_CHECK(cudaMemcpyAsync(dst, src, array.bytes, array.device < 0 ? host_kind : cudaMemcpyDefault, caller_));
}

void StagedCalls::copy_in(size_t call) const {
  const std::vector<Array>& inputs = calls_[call].inputs;
  for (size_t i = 0; i < inputs.size(); ++i) copy(placed_[call].inputs[i], inputs[i].data, inputs[i], cudaMemcpyHostToDevice);
}

void StagedCalls::copy_out(size_t call) const {
  const std::vector<Array>& outputs = calls_[call].outputs;
  const bool blocks = target::kCopiesBlock && std::ranges::any_of(outputs, [](const Array& array) { return array.device < 0; });
  if (blocks) instance_.member().synchronize(caller_);  // Throws if the ranks are stopped. A blocking copy would not return then.
  for (size_t i = 0; i < outputs.size(); ++i) copy(outputs[i].data, placed_[call].outputs[i], outputs[i], cudaMemcpyDeviceToHost);
}

void StagedCalls::meet() const { target::meet(static_cast<int>(instance_.member().rank().size())); }

// Waits for the calls, and then for streams that an incorrect program did not join.
void StagedCalls::finish() const {
  instance_.member().synchronize(caller_);
  HW_CHECK(cudaDeviceSynchronize());
}

void StagedCalls::run(const Schedule& schedule, bool poison) {
  instance_.in_use(schedule, [&] {
    meet();
    for (size_t call = 0; call < calls_.size(); ++call) {
      const Placed& placed = placed_[call];
      const std::vector<Array>& outputs = calls_[call].outputs;
      for (size_t i = 0; poison && i < outputs.size(); ++i)
        HW_CHECK(cudaMemsetAsync(placed.outputs[i], 0xff, outputs[i].bytes, caller_));
      if (poison) instance_.poison(caller_);
      copy_in(call);
      instance_.take(nothing_bound_, placed.inputs, placed.outputs);
      instance_.make_call(caller_, [&] { instance_.enqueue(caller_); });
      copy_out(call);
    }
    finish();
  });
}

std::vector<Timing> StagedCalls::measure(const Schedule& schedule, int warmups, int repetitions, Gate& gate) {
  using Clock = std::chrono::steady_clock;
  std::vector<Timing> timings;
  instance_.in_use(schedule, [&] {
    const Gate::Opening at_end(gate);  // Releases the streams if a rank fails.
    const Event begin(cudaEventDefault), end(cudaEventDefault);
    Marks marks;
    copy_in(0);
    instance_.take(nothing_bound_, placed_[0].inputs, placed_[0].outputs);
    for (int i = 0; i < warmups + repetitions; ++i) {
      instance_.member().synchronize(caller_);
      meet();
      gate.hold(caller_, i);
      std::chrono::duration<double, std::micro> enqueue{};
      instance_.make_call(caller_, [&] {
        HW_CHECK(cudaEventRecord(begin, caller_));
        const auto start = Clock::now();
        instance_.enqueue(caller_);
        enqueue = Clock::now() - start;
        HW_CHECK(cudaEventRecord(end, caller_));
      });
      gate.enqueued(i);
      instance_.member().synchronize(caller_);
      float total_ms = 0;
      HW_CHECK(cudaEventElapsedTime(&total_ms, begin, end));
      std::vector<float> marks_ms = marks.take(begin);
      if (i >= warmups) timings.push_back({enqueue.count(), total_ms, std::move(marks_ms)});
    }
    copy_out(0);
    finish();
  });
  return timings;
}

}  // namespace hw
