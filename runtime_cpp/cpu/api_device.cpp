// cudaSetDevice and what can be asked of a device.
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
  return wait_for_device(call.lock, this_thread().device);
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
  const bool fresh = Machine::get().peer_access.emplace(device, peer).second;
  return fresh ? cudaSuccess : error(cudaErrorPeerAccessAlreadyEnabled, "cudaDeviceEnablePeerAccess: already enabled");
}

}  // extern "C"
