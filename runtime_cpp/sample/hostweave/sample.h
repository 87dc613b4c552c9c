// What main.cpp of an exported program needs besides the program: ranks as threads, their communicators, tensors and times.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <barrier>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "hostweave/channel.h"
#include "hostweave/check.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"

namespace hw::sample {

struct Setting {
  const char* name;
  int64_t* value;
};

// Reads arguments such as "M=1024" to where the settings of these names are; at --help prints the settings and ends the process.
// Throws std::invalid_argument for others.
void read(int argc, char** argv, const std::vector<Setting>& settings);

// Throws std::runtime_error where this host has fewer devices. The CPU target makes as many.
void use_devices(int count);

// Runs `rank` for each rank in a thread of its own. Ends the process where one throws, as the others wait for it.
void run_ranks(int count, const std::function<void(int)>& rank);

// Throws std::runtime_error unless the condition holds.
void expect(bool condition, const std::string& what);

// The communicators of one rank: that of all ranks, and those of process groups, which are split off it.
class Communicators {
 public:
  Communicators(const ncclUniqueId& id, int rank, int count);
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // The ranks that give the same `color` are a process group, in the order of their `place`.
  Channel channel(int color, int place, int64_t size);
  // All ranks take part in making a process group, also those that are in none.
  void no_channel();

 private:
  std::vector<ncclComm_t> comms_;
};

// A tensor of `T` in the memory of the current device.
template <class T>
class DeviceTensor {
 public:
  DeviceTensor(cudaDataType_t dtype, const Shape& shape) : count_(1) {
    for (int i = 0; i < shape.ndim; ++i) count_ *= shape[i];
    tensor_ = {.dtype = dtype, .shape = shape};
    HW_CHECK(cudaGetDevice(&tensor_.device));
    HW_CHECK(cudaMalloc(&tensor_.data, bytes()));
  }
  ~DeviceTensor() { cudaFree(tensor_.data); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  operator Tensor() const { return tensor_; }

  // The same for the same seed.
  void randomize(unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> digits(1, 8);
    const int unit = std::is_integral_v<T> ? 1 : 8;
    std::vector<T> values;
    for (int64_t i = 0; i < count_; ++i) values.push_back(T(float(digits(random)) / unit));
    HW_CHECK(cudaMemcpy(tensor_.data, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  void fill_bytes(int value) { HW_CHECK(cudaMemset(tensor_.data, value, bytes())); }

  std::vector<char> to_host() const {
    std::vector<char> result(bytes());
    HW_CHECK(cudaMemcpy(result.data(), tensor_.data, bytes(), cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  Tensor tensor_;
  int64_t count_;
};

// Medians of some calls.
struct Times {
  double device_ms, enqueue_us;
};

// Times calls that enqueue on `stream`. All ranks begin each call together.
Times measure(const std::function<void()>& call, cudaStream_t stream, std::barrier<>& meet, int64_t repetitions);

}  // namespace hw::sample
