// cudaSetDevice and what can be asked of a device.
#include <unistd.h>

#include "errors.h"
#include "machine.h"
#include "submit.h"

using namespace hostweave::cpu;

namespace {

bool exists(int device) { return device >= 0 && device < Machine::get().config.devices; }
cudaError_t no_such_device(const char* call, int device) {
  return error(cudaErrorInvalidDevice,
               std::string(call) + ": device " + std::to_string(device) + " of " + std::to_string(Machine::get().config.devices));
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  Call call;
  *count = Machine::get().config.devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Call call;
  if (!exists(device)) return no_such_device("cudaSetDevice", device);
  this_thread().device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = this_thread().device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  return wait_for_device(call.lock, this_thread().device);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call;
  if (!exists(device)) return no_such_device("cudaDeviceGetAttribute", device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimX:
      *value = 1024;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 2147483647;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
      break;
    case cudaDevAttrL2CacheSize:
      *value = 1 << 20;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 0;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrStreamPrioritiesSupported:
      *value = 1;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    default:
      return cuda_not_supported("cudaDeviceGetAttribute: attribute " + std::to_string(attribute));
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  Call call;
  if (!exists(device)) return no_such_device("cudaDeviceCanAccessPeer", device);
  if (!exists(peer)) return no_such_device("cudaDeviceCanAccessPeer", peer);
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  Call call;
  const int device = this_thread().device;
  if (!exists(peer) || peer == device) return no_such_device("cudaDeviceEnablePeerAccess", peer);
  if (flags != 0) return error(cudaErrorInvalidValue, "cudaDeviceEnablePeerAccess: flags must be 0");
  const bool fresh = Machine::get().peer_access.insert(static_cast<std::uint64_t>(device) << 32 | peer).second;
  return fresh ? cudaSuccess : error(cudaErrorPeerAccessAlreadyEnabled, "cudaDeviceEnablePeerAccess: already enabled");
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  Call call;
  const int device = this_thread().device;
  const bool was = Machine::get().peer_access.erase(static_cast<std::uint64_t>(device) << 32 | static_cast<unsigned>(peer)) != 0;
  return was ? cudaSuccess : error(cudaErrorPeerAccessNotEnabled, "cudaDeviceDisablePeerAccess: not enabled");
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

}  // extern "C"
