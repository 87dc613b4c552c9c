// Arguments of a program: borrowed, contiguous arrays on a device.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace hw {

constexpr int kMaxDims = 8;
constexpr int64_t kAny = -1;  // wildcard in an expected shape

struct Shape {
  int ndim = 0;
  int64_t dims[kMaxDims] = {};

  Shape() = default;
  // Throws ArgumentError if there are more than kMaxDims sizes.
  Shape(std::initializer_list<int64_t> sizes) {
    if (sizes.size() > kMaxDims) [[unlikely]]
      too_many_dims(sizes.size());
    for (int64_t size : sizes) dims[ndim++] = size;
  }
  int64_t operator[](int i) const { return dims[i]; }
  auto operator<=>(const Shape&) const = default;

 private:
  [[noreturn]] static void too_many_dims(size_t count);
};

// Name of an argument. In an array of structs, the name consists of a prefix, an index and a suffix.
struct Name {
  const char* text;
  int64_t number = -1;
  const char* suffix = "";

  Name(const char* text, int64_t number = -1, const char* suffix = "") : text(text), number(number), suffix(suffix) {}
};

struct Tensor {
  void* data = nullptr;  // null only if the tensor has no elements
  cudaDataType_t dtype = CUDA_R_32F;
  Shape shape;
  int device = 0;
  Shape global_shape = {};  // shape of the global tensor, if known

  int64_t dim(int i) const { return shape[i]; }
  // Global size of a dim that is sharded over `ranks` ranks. Assumes equal shards if the global shape is unknown.
  int64_t global_dim(int i, int64_t ranks) const { return global_shape.ndim ? global_shape[i] : shape[i] * ranks; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // Throws ArgumentError if the dtype, shape, device or data pointer is wrong. `name` and `type` are for the message. `type` has
  // the names of the dims, such as "bf16[M/8, K]". `type` may be null if no dim has a name.
  void expect(const Name& name, cudaDataType_t expected_dtype, const Shape& expected_shape, int expected_device,
              const char* type = nullptr) const;
};

// Copies a donated input to its output, unless they are the same array. Throws ArgumentError unless the output has the input's
// dtype, device and number of elements, and memory for them.
cudaError_t take_over(const Name& name, const Tensor& donated, const Tensor& output, cudaStream_t caller);

// Throws ArgumentError unless `divisor` divides the size.
void expect_divisible(const char* name, int64_t size, int64_t divisor);

// Throws ArgumentError if a difference of sizes, such as "M - 2", is negative.
void expect_room(const char* difference, int64_t size);
// Throws ArgumentError if a reduction over this size would have no elements.
void expect_elements(const char* reduction, const char* size_name, int64_t size);

// Throws ExecutionError if a program is run with sizes for which it was not prepared.
void expect_prepared(bool prepared);

}  // namespace hw
