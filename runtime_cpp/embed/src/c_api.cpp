#include "hostweave/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "hostweave/check.h"
#include "hostweave/errors.h"

namespace hw::c {
namespace {

thread_local std::string last_error;

static_assert(int(CUDA_R_32F) == HW_F32 && int(CUDA_R_16F) == HW_F16 && int(CUDA_R_16BF) == HW_BF16);
static_assert(int(CUDA_R_32I) == HW_I32 && int(CUDA_R_8U) == HW_U8 && HW_MAX_DIMS == kMaxDims);
static_assert(sizeof(hw_id) == sizeof(ncclUniqueId));

hw_status failed(hw_status status, const char* why) {
  last_error = why;
  return status;
}

Shape shape(const hw_shape& given) {
  if (given.ndim < 0 || given.ndim > kMaxDims)
    throw ArgumentError("a shape of " + std::to_string(given.ndim) + " dims; it must have 0 to " + std::to_string(kMaxDims));
  Shape result;
  result.ndim = given.ndim;
  std::copy_n(given.dims, given.ndim, result.dims);
  return result;
}

}  // namespace

hw_status guarded(void (*work)(void*), void* closure) {
  try {
    last_error.clear();
    work(closure);
    return HW_OK;
  } catch (const ArgumentError& error) {
    return failed(HW_ARGUMENT_ERROR, error.what());
  } catch (const ExecutionError& error) {
    return failed(HW_EXECUTION_ERROR, error.what());
  } catch (const std::exception& error) {
    return failed(HW_OTHER_ERROR, error.what());
  } catch (...) {
    return failed(HW_OTHER_ERROR, "an exception that is no std::exception");
  }
}

void expect_pointer(const void* pointer, const char* name) {
  if (!pointer) throw ArgumentError(std::string(name) + ": the pointer is null; pass the address of an object");
}

Tensor tensor(const hw_tensor& given) {
  return {given.data, cudaDataType_t(given.dtype), shape(given.shape), given.device, shape(given.global_shape)};
}

hw_shape shape(const Shape& given) {
  hw_shape result{.ndim = given.ndim, .dims = {}};
  std::copy_n(given.dims, given.ndim, result.dims);
  return result;
}

}  // namespace hw::c

using hw::c::at;
using hw::c::guarded;

const char* hw_last_error() { return hw::c::last_error.c_str(); }

hw_status hw_use_devices(int count) {
  return guarded([&] { hw::use_devices(count); });
}

hw_status hw_use_processes() { return guarded(hw::use_processes); }

hw_status hw_new_id(hw_id* id) {
  return guarded([&] {
    ncclUniqueId made;
    HW_CHECK(ncclGetUniqueId(&made));
    std::memcpy(&at(id, "id"), &made, sizeof made);
  });
}

hw_status hw_world_create(const hw_id* id, int device, int rank, int size, hw_world** world) {
  return guarded([&] {
    ncclUniqueId given;
    std::memcpy(&given, &at(id, "id"), sizeof given);
    at(world, "world") = new hw_world{.world = {given, device, rank, size}};
  });
}

hw_status hw_world_destroy(hw_world* world) {
  return guarded([&] { delete world; });
}
