// Support for main.cpp of an exported program: ranks as threads, tensors, and timing.
#pragma once
#include <cuda_runtime_api.h>

#include <barrier>
#include <cstdint>
#include <functional>
#include <initializer_list>
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
// unknown names, and for values other than numbers of at least 1.
void read(int argc, char** argv, const std::vector<Setting>& settings);

// Calls rank(r) on a separate thread for each rank r. Exits the process if a call throws, because the other ranks would wait for
// this rank.
void run_ranks(int count, const std::function<void(int)>& rank);

// A dim of a global tensor. A rank holds shard `index` of `shards`. In zigzag, the dim has 2 * shards pieces, and shard i
// consists of piece i from the start and piece i from the end.
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

// Access to the elements of arrays of one type. `set` writes one of 8 values: an integer from 1 to 8, or an odd eighth between -1
// and 1. A bool is true for odd digits. `get` returns the byte of a bool.
struct Element {
  size_t bytes;
  bool is_integral;
  double (*get)(const char* elements, int64_t i);
  void (*set)(char* elements, int64_t i, int digit);
};

template <class T>
constexpr Element kElement = {sizeof(T), std::is_integral_v<T>,
                              [](const char* elements, int64_t i) {
                                using Stored = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;
                                using Number = std::conditional_t<std::is_arithmetic_v<T>, Stored, float>;
                                return double(Number(reinterpret_cast<const Stored*>(elements)[i]));
                              },
                              [](char* elements, int64_t i, int digit) {
                                reinterpret_cast<T*>(elements)[i] = std::is_same_v<T, bool> ? T(float(digit % 2))
                                                                    : std::is_integral_v<T> ? T(float(1 + digit))
                                                                                            : T(float(2 * digit - 7) / 8);
                              }};

// Tolerance for floats, in unit roundoffs of the largest reference value.
struct Tolerance {
  int64_t roundoffs;
  double unit;
};

using Bytes = std::vector<char>;

// A tensor in the memory of the current device. `twin` is a rank with the same block. `is_here` is false if this rank has
// no block.
class DeviceTensor {
 public:
  DeviceTensor(const Element& element, const Name& name, cudaDataType_t dtype, Part part, std::initializer_list<Dim> dims,
               int twin = 0, bool is_here = true);

  operator Tensor() const { return tensor_; }

  // Fills the tensor with pseudorandom values. A value depends on the seed and on the global index, so replicas are equal.
  void randomize(uint64_t seed);
  void fill_bytes(int value) const;
  Bytes to_host() const;
  // Throws std::runtime_error unless the tensor equals `before` (its bytes after the previous call) and `of_twin`.
  void expect_same(const Bytes& before, const Bytes& of_twin) const;
  // Throws std::runtime_error unless the tensor is close to its block of the global tensor with the bytes `reference`.
  void expect_close(const Bytes& reference, const Tolerance& tolerance) const;

  int twin() const { return twin_; }

 private:
  size_t bytes() const { return block_.count() * element_.bytes; }

  const Element& element_;
  Name name_;
  Block block_;
  int twin_;
  bool is_here_;
  DeviceMemory memory_;
  Tensor tensor_;
};

// The inputs and outputs of a rank, or the global inputs and outputs.
struct Tensors {
  std::vector<DeviceTensor> inputs, outputs;

  void randomize_inputs();
  std::vector<Bytes> outputs_to_host() const;
};

// Median times of several calls.
struct Times {
  double device_ms, enqueue_us;
};

// Times calls that enqueue on `stream`. All ranks start each call together.
Times measure(const std::function<void()>& call, cudaStream_t stream, std::barrier<>& meet, int64_t repetitions);

}  // namespace hw::sample
