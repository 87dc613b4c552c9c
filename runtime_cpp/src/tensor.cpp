#include "hostweave/tensor.h"

#include <algorithm>
#include <string>

#include "hostweave/errors.h"

namespace hw {
namespace {

struct Dtype {
  cudaDataType_t type;
  const char* name;
  size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {CUDA_R_64F, "f64", 8},        {CUDA_R_32F, "f32", 4},        {CUDA_R_16F, "f16", 2}, {CUDA_R_16BF, "bf16", 2},
    {CUDA_R_8F_E4M3, "f8e4m3", 1}, {CUDA_R_8F_E5M2, "f8e5m2", 1}, {CUDA_R_64I, "i64", 8}, {CUDA_R_32I, "i32", 4},
    {CUDA_R_16I, "i16", 2},        {CUDA_R_8I, "i8", 1},          {CUDA_R_64U, "u64", 8}, {CUDA_R_32U, "u32", 4},
    {CUDA_R_16U, "u16", 2},        {CUDA_R_8U, "u8", 1},
};

std::string dtype_name(cudaDataType_t dtype) {
  const auto* const found = std::ranges::find(kDtypes, dtype, &Dtype::type);
  return found == std::end(kDtypes) ? "dtype " + std::to_string(dtype) : found->name;
}

// Returns text for messages, such as "bf16[*, 512]" for dtype bf16 and shape {kAny, 512}.
std::string type_name(const std::string& dtype, const Shape& shape) {
  std::string dims;
  for (int i = 0; i < shape.ndim; ++i) {
    dims += (i ? ", " : "") + (shape[i] == kAny ? "*" : std::to_string(shape[i]));
  }
  return dtype + "[" + dims + "]";
}

bool fits(const Shape& shape, const Shape& expected) {
  return std::equal(shape.dims, shape.dims + shape.ndim, expected.dims, expected.dims + expected.ndim,
                    [](int64_t size, int64_t wanted) { return size >= 0 && (wanted == kAny || size == wanted); });
}

int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (int i = 0; i < shape.ndim; ++i) count *= shape[i];
  return count;
}

void expect_data(const Name& name, const Tensor& tensor) {
  if (tensor.data || elements(tensor.shape) == 0) return;
  throw ArgumentError(text_of(name) + ": the data pointer is null, but " + type_name(dtype_name(tensor.dtype), tensor.shape) +
                      " has elements; pass the address of memory on device " + std::to_string(tensor.device));
}

}  // namespace

std::string text_of(const Name& name) { return name.text + (name.number < 0 ? "" : std::to_string(name.number)) + name.suffix; }

void Shape::too_many_dims(size_t count) {
  throw ArgumentError(std::to_string(count) + " dims: an array has at most " + std::to_string(kMaxDims) + "; reshape it");
}

void Tensor::expect(const Name& name, cudaDataType_t expected_dtype, const Shape& expected_shape, int expected_device,
                    const char* type) const {
  if (dtype != expected_dtype || !fits(shape, expected_shape)) {
    const std::string declared = type ? type : type_name(dtype_name(expected_dtype), expected_shape);
    const std::string wanted = type_name(declared.substr(0, declared.find('[')), expected_shape);
    const std::string here = declared == wanted ? "" : ", here " + wanted;
    throw ArgumentError(text_of(name) + ": expected " + declared + here + ", got " + type_name(dtype_name(dtype), shape));
  }
  if (device != expected_device) {
    throw ArgumentError(text_of(name) + ": expected on device " + std::to_string(expected_device) + ", got device " +
                        std::to_string(device));
  }
  expect_data(name, *this);
}

cudaError_t take_over(const Name& name, const Tensor& donated, const Tensor& output, cudaStream_t caller) {
  if (output.dtype != donated.dtype || elements(output.shape) != elements(donated.shape) || output.device != donated.device) {
    output.expect(name, donated.dtype, donated.shape, donated.device);
  }
  expect_data(name, output);
  if (donated.data == output.data) return cudaSuccess;
  const size_t bytes =
      std::ranges::find(kDtypes, output.dtype, &Dtype::type)->bytes * static_cast<size_t>(elements(output.shape));
  return bytes == 0 ? cudaSuccess : cudaMemcpyAsync(output.data, donated.data, bytes, cudaMemcpyDeviceToDevice, caller);
}

void expect_divisible(const char* name, int64_t size, int64_t divisor) {
  if (size % divisor == 0) return;
  throw ArgumentError(std::string(name) + " = " + std::to_string(size) + ": must be a multiple of " + std::to_string(divisor) +
                      "; pad it, or change the ranks, chunks or steps that divide it");
}

void expect_room(const char* difference, int64_t size) {
  if (size >= 0) return;
  throw ArgumentError(std::string(difference) + " = " + std::to_string(size) +
                      ": a slice or an index exceeds its dim; pass at least " + std::to_string(-size) + " more, or take less");
}

void expect_elements(const char* reduction, const char* size_name, int64_t size) {
  if (size > 0) return;
  throw ArgumentError(std::string(size_name) + " = " + std::to_string(size) + ": there is no " + reduction +
                      " of no elements; pass at least 1");
}

void expect_prepared(bool prepared) {
  if (!prepared) throw ExecutionError("run: not prepared for these sizes; call prepare with them on every rank first");
}

}  // namespace hw
