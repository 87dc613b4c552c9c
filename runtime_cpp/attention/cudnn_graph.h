// Op graphs for the backend API of cuDNN. cuDNN runs fused kernels for graphs with a known pattern.
#pragma once
#include <cudnn.h>

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "hostweave/errors.h"

namespace hw {

constexpr int64_t kAlignment = 16;  // alignment of operands, in bytes

inline void expect(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char reason[512] = "";
  cudnnGetLastErrorString(reason, sizeof reason);
  throw ExecutionError(std::string("attention: cuDNN: ") + what + ": " + cudnnGetErrorString(status) + " " + reason);
}

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) { expect(cudnnBackendCreateDescriptor(type, &handle_), "a descriptor"); }
  ~Descriptor() { cudnnBackendDestroyDescriptor(handle_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  operator cudnnBackendDescriptor_t() const { return handle_; }

  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const void* values, int64_t count = 1) {
    expect(cudnnBackendSetAttribute(handle_, name, type, count, values), "an attribute");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &value.handle_);
  }
  Descriptor& finish(const char* what) {
    expect(cudnnBackendFinalize(handle_), what);
    return *this;
  }

 private:
  cudnnBackendDescriptor_t handle_ = nullptr;
};

using Dims = std::array<int64_t, 4>;
using Number = std::variant<float, int32_t>;

struct Value {
  const Descriptor* descriptor = nullptr;
  Dims dims{};
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  int64_t number = 0;

  explicit operator bool() const { return descriptor != nullptr; }
};

struct Ends {
  Value m{}, n{}, k{};
  bool padded = false;
};

inline Dims row_major(const Dims& dims) { return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}; }
inline Dims turned(const Dims& x) { return {x[0], x[1], x[3], x[2]}; }

// A graph of ops on numbered tensors. Numbers below 16 belong to the caller.
class Graph {
 public:
  // With `offsets`, each batch element starts at the given offset instead of a multiple of the batch stride.
  Value tensor(int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides, const Value& offsets = {}) {
    return make(number, type, dims, strides, false, false, offsets);
  }
  // A tensor in memory that the attention plan allocates: four bytes per element, also for smaller types.
  Value own(cudnnDataType_t type, const Dims& dims) { return own(type, dims, row_major(dims), dims[0] * row_major(dims)[0]); }
  Value own(cudnnDataType_t type, const Dims& dims, const Dims& strides, int64_t elements, const Value& offsets = {}) {
    owned_.emplace(next_, elements * 4);
    return make(next_++, type, dims, strides, false, false, offsets);
  }
  // A virtual tensor: an intermediate result without an address.
  Value between(cudnnDataType_t type, const Dims& dims) { return between(type, dims, row_major(dims)); }
  Value between(cudnnDataType_t type, const Dims& dims, const Dims& strides, const Value& offsets = {}) {
    return make(next_++, type, dims, strides, true, false, offsets);
  }
  Value number(Number value) {
    numbers_.emplace(next_, value);
    const Dims one{1, 1, 1, 1};
    return make(next_++, std::holds_alternative<float>(value) ? CUDNN_DATA_FLOAT : CUDNN_DATA_INT32, one, one, false, true);
  }

  // Matmul with optional lengths of m, n and k per batch element.
  void matmul(const Value& a, const Value& b, const Value& c, const Ends& ends = {}) {
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    const cudnnDataType_t in_float = CUDNN_DATA_FLOAT;
    const double padding = 0;
    how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &in_float);
    if (ends.padded) how.set(CUDNN_ATTR_MATMUL_PADDING_VALUE, CUDNN_TYPE_DOUBLE, &padding);
    how.finish("a product");
    Descriptor& made = op(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor).set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor);
    made.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor).set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    if (ends.m) made.set(CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, *ends.m.descriptor);
    if (ends.n) made.set(CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, *ends.n.descriptor);
    if (ends.k) made.set(CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, *ends.k.descriptor);
    made.finish("a product");
  }

  // y = mode(x, b), or mode(x) without b. A select returns x if t is true, and b otherwise.
  Value pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t type, const Value& x, const Value& b = {}, const Value& t = {},
                  cudnnDataType_t math = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    const Value y = between(type, x.dims);
    pointwise_to(y, mode, x, b, t, math, axis);
    return y;
  }
  void pointwise_to(const Value& y, cudnnPointwiseMode_t mode, const Value& x, const Value& b = {}, const Value& t = {},
                    cudnnDataType_t math = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
    how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &math);
    if (axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &axis);
    how.finish("a pointwise op");
    Descriptor& made = op(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
    if (b) made.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b.descriptor);
    if (t) made.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *t.descriptor);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor).finish("a pointwise op");
  }

  Value reduce(cudnnReduceTensorOp_t kind, const Value& x) {
    const Value y = between(CUDNN_DATA_FLOAT, {x.dims[0], x.dims[1], x.dims[2], 1});
    reduce_to(y, kind, x);
    return y;
  }
  void reduce_to(const Value& y, cudnnReduceTensorOp_t kind, const Value& x) {
    Descriptor& how = descriptors_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    const cudnnDataType_t in_float = CUDNN_DATA_FLOAT;
    how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &kind);
    how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &in_float).finish("a reduction");
    op(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)
        .finish("a reduction");
  }

  void reshape(const Value& x, const Value& y) {
    op(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x.descriptor)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *y.descriptor)
        .finish("a reshape");
  }

  const std::vector<cudnnBackendDescriptor_t>& ops() const { return ops_; }
  const std::map<int64_t, Number>& numbers() const { return numbers_; }
  const std::map<int64_t, int64_t>& owned() const { return owned_; }

 private:
  Value make(int64_t number, cudnnDataType_t type, const Dims& dims, const Dims& strides, bool is_virtual, bool by_value,
             const Value& offsets = {}) {
    Descriptor& made = descriptors_.emplace_back(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &number);
    made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
    made.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), dims.size());
    made.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), strides.size());
    made.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &kAlignment);
    made.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &is_virtual);
    made.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, &by_value);
    if (offsets) made.set(CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, *offsets.descriptor);
    made.finish("a tensor");
    return {&made, dims, type, number};
  }
  Descriptor& op(cudnnBackendDescriptorType_t type) {
    Descriptor& made = descriptors_.emplace_back(type);
    ops_.push_back(made);
    return made;
  }

  std::list<Descriptor> descriptors_;
  std::vector<cudnnBackendDescriptor_t> ops_;
  std::map<int64_t, Number> numbers_;
  std::map<int64_t, int64_t> owned_;  // tensor -> bytes
  int64_t next_ = 16;
};

}  // namespace hw
