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
constexpr int64_t kAny = -1;  // in an expected shape: a size that the argument decides

struct Shape {
  int ndim = 0;
  int64_t dims[kMaxDims] = {};

  Shape() = default;
  // Throws ArgumentError for more than kMaxDims.
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

// The name of an argument: of one in an array of structs, what comes before its number, and after it.
struct Name {
  const char* text;
  int64_t number = -1;
  const char* suffix = "";

  Name(const char* text, int64_t number = -1, const char* suffix = "") : text(text), number(number), suffix(suffix) {}
};

struct Tensor {
  void* data = nullptr;
  cudaDataType_t dtype = CUDA_R_32F;
  Shape shape;
  int device = 0;
  Shape global_shape = {};  // of the global tensor of which this is a rank's block, where that is known

  int64_t dim(int i) const { return shape[i]; }
  // The global size of a dim that `ranks` ranks share: evenly, if nothing is known.
  int64_t global_dim(int i, int64_t ranks) const { return global_shape.ndim ? global_shape[i] : shape[i] * ranks; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // Throws ArgumentError unless the tensor has this dtype, shape and device. `name` and `type` (such as "bf16[M/8, K]")
  // are for the message.
  void expect(const Name& name, const char* type, cudaDataType_t expected_dtype, const Shape& expected_shape,
              int expected_device) const;
};

// Has an output begin with the elements of the input that was donated for it: mostly they are one array. Throws ArgumentError
// unless it has the input's dtype, device and number of elements.
cudaError_t take_over(const Name& name, const Tensor& donated, const Tensor& output, cudaStream_t caller);

// Throws ArgumentError unless `divisor` divides the size.
void expect_divisible(const char* name, int64_t size, int64_t divisor);

// Throws ArgumentError where a difference of sizes that the program takes, such as "M - 2", is negative.
void expect_room(const char* difference, int64_t size);
// Of a size that a reduction goes over, which has no value of no elements.
void expect_elements(const char* reduction, const char* size_name, int64_t size);

// Throws ExecutionError if a program is run with sizes that it was not prepared for.
void expect_prepared(bool prepared);

}  // namespace hw
