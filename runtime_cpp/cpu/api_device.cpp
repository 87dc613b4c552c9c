// cudaSetDevice and what can be asked of a device.
#include <unistd.h>

#include <climits>

#include "capture.h"
#include "errors.h"
#include "machine.h"

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
  if (const auto illegal = forbidden_in_capture("cudaDeviceSynchronize")) return *illegal;
  return wait_for_device(call.lock, this_thread().device);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call;
  if (!exists(device)) return no_such_device("cudaDeviceGetAttribute", device);
  static const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxGridDimX, INT_MAX},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMultiProcessorCount, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN))},
      {cudaDevAttrL2CacheSize, 1 << 20},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrComputeCapabilityMajor, 0},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  const auto found = values.find(attribute);
  if (found == values.end()) return cuda_not_supported("cudaDeviceGetAttribute: attribute " + std::to_string(attribute));
  *value = found->second;
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

}  // extern "C"
