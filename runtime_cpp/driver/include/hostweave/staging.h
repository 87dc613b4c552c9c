// Copies of a rank's arrays, for calls with arrays in host memory or on other devices. Misaligned arrays are copied too.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "hostweave/device_memory.h"
#include "hostweave/member.h"
#include "hostweave/tensor.h"

namespace hw {

// A contiguous local array.
struct Array {
  void* data = nullptr;
  size_t bytes = 0;
  int device = -1;  // -1: host memory. Outputs must be in host memory or on the rank's GPU. Inputs may be anywhere.
};

// Inputs of many calls: the addresses of bound inputs. nullopt marks an input that every call passes.
struct Table {
  std::vector<std::optional<void*>> bound;

  // Sets the addresses of `tensors`. Throws ArgumentError if the number of `inputs` or of `tensors` is wrong.
  void fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const;
};

class Staging {
 public:
  // The member must outlive this object.
  explicit Staging(Member& member);
  ~Staging();
  Staging(Staging&&) = delete;

  struct Call {
    std::vector<Array> inputs, outputs;
    // Addresses on this device. Set by `place`.
    Table placed_inputs{};
    std::vector<void*> placed_outputs{};
  };
  // Allocates memory for these calls, which share it, and copies inputs from other GPUs. All ranks place their arrays before any
  // rank runs.
  void place(std::vector<Call> calls);
  const std::vector<Call>& calls() const { return calls_; }
  cudaStream_t stream() const { return stream_; }  // the stream of the calls and copies

  // During a Member::Use: enqueues copies of the inputs of a call, or of its outputs.
  void upload(const Call& call) const;
  void download(const Call& call) const;

 private:
  void fetch(std::vector<Array>& inputs, std::vector<DeviceMemory>& fetched) const;
  std::vector<void*> addresses(std::vector<DeviceMemory>& memory, const std::vector<Array>& arrays) const;
  void copy(void* dst, const void* src, const Array& array, cudaMemcpyKind host_kind) const;

  Member& member_;
  cudaStream_t stream_ = nullptr;
  std::vector<DeviceMemory> inputs_, outputs_;      // memory for copies of arrays, shared by all calls
  std::vector<std::vector<DeviceMemory>> fetched_;  // [call][input]
  std::vector<Call> calls_;
};

}  // namespace hw
