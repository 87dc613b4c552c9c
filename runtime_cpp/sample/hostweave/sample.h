// Support for main.cpp of an exported program: ranks as threads, tensors, and timing.
#pragma once
#include <cuda_runtime_api.h>

#include <barrier>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "hostweave/device_memory.h"
#include "hostweave/errors.h"
#include "hostweave/tensor.h"
#include "hostweave/types.h"
#include "hostweave/world.h"

namespace hw::sample {

struct Setting {
  const char* name;
  int64_t* value;
};

// Parses arguments such as "M=1024" into the settings. --help prints the settings and exits. Throws std::invalid_argument for
// unknown arguments.
void read(int argc, char** argv, const std::vector<Setting>& settings);

// Runs `rank` for each rank in its own thread. Exits if one throws, because the others would wait for it.
void run_ranks(int count, const std::function<void(int)>& rank);

// Throws std::runtime_error unless the condition holds.
void expect(bool condition, const std::string& what);
inline void expect(bool condition, const Name& name, const char* what) { expect(condition, text_of(name) + ": " + what); }

// A dim of a global tensor. A rank holds one of `shards` shards. In zigzag it holds two of 2 * shards pieces: number r from
// either end.
struct Dim {
  int64_t size, shards = 1, index = 0;
  bool zigzag = false;
};

enum class Part { kLocal, kGlobal };  // local block, or global tensor

// Position of a block in its global tensor.
class Block {
 public:
  Block(Part part, std::initializer_list<Dim> dims);
  const Shape& shape() const { return shape_; }
  const Shape& global() const { return global_; }
  int64_t count() const;
  // Calls visit(index in the block, index in the global tensor) for each element.
  void each(const std::function<void(int64_t, int64_t)>& visit) const;

 private:
  Shape shape_, global_, begin_, shift_;  // shift_: additional global offset of the second piece in zigzag
};

// Pseudorandom number from 0 to 7, determined by seed and index.
int sample_digit(uint64_t seed, uint64_t index);

// Tolerance for floats, in unit roundoffs of the largest reference value.
struct Tolerance {
  int64_t roundoffs;
  double unit;
};

// Throws std::runtime_error unless the block equals its part of the global reference within the tolerance.
void expect_close(const Name& name, const Block& block, const std::function<double(int64_t)>& element,
                  const std::function<double(int64_t)>& reference, const Tolerance& tolerance);

// A tensor of `T` in the memory of the current device.
template <class T>
class DeviceTensor {
 public:
  DeviceTensor(cudaDataType_t dtype, Part part, std::initializer_list<Dim> dims) : block_(part, dims) {
    tensor_ = {.dtype = dtype, .shape = block_.shape(), .global_shape = block_.global()};
    HW_CHECK(cudaGetDevice(&tensor_.device));
    tensor_.data = memory_.reserve(bytes());
  }

  operator Tensor() const { return tensor_; }

  // Integers from 1 to 8, or odd eighths between -1 and 1. Values depend on the global index, so replicas are equal.
  void randomize(uint64_t seed) {
    std::vector<T> values(block_.count());
    block_.each([&](int64_t i, int64_t global) {
      const int digit = sample_digit(seed, global);
      values[i] = std::is_integral_v<T> ? T(float(1 + digit)) : T(float(2 * digit - 7) / 8);
    });
    HW_CHECK(cudaMemcpy(tensor_.data, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  void fill_bytes(int value) { HW_CHECK(cudaMemset(tensor_.data, value, bytes())); }

  std::vector<char> to_host() const {
    std::vector<char> result(bytes());
    HW_CHECK(cudaMemcpy(result.data(), tensor_.data, bytes(), cudaMemcpyDeviceToHost));
    return result;
  }
  // Throws std::runtime_error unless it equals its block of the reference, which is the bytes of a global tensor.
  void expect_close(const Name& name, const std::vector<char>& reference, Tolerance tolerance) const {
    if (std::is_integral_v<T>) tolerance.roundoffs = 0;
    const std::vector<char> own = to_host();
    const auto in = [](const std::vector<char>& bytes) {
      return [values = reinterpret_cast<const T*>(bytes.data())](int64_t i) { return number(values[i]); };
    };
    sample::expect_close(name, block_, in(own), in(reference), tolerance);
  }

 private:
  size_t bytes() const { return block_.count() * sizeof(T); }
  static double number(T value) {
    if constexpr (std::is_arithmetic_v<T>) {
      return double(value);
    } else {
      return double(float(value));
    }
  }

  Block block_;
  DeviceMemory memory_;
  Tensor tensor_;
};

// Median times of several calls.
struct Times {
  double device_ms, enqueue_us;
};

// Times calls that enqueue on `stream`. All ranks start each call together.
Times measure(const std::function<void()>& call, cudaStream_t stream, std::barrier<>& meet, int64_t repetitions);

}  // namespace hw::sample
