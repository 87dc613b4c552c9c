#include <map>
#include <mutex>

#include "hostweave/driver_function.h"
#include "hostweave/jit.h"

namespace hw {
namespace {

// Functions of the driver that load a cubin for all devices. The CUDA runtime has such functions only since 12.8.
struct Driver {
  using Library = struct CUlib_st*;
  using LoadData = int(Library*, const void* code, void*, void*, unsigned, void*, void*, unsigned);
  using GetKernel = int(const void** kernel, Library, const char* name);

  LoadData* load = driver_function<LoadData>("cuLibraryLoadData");
  GetKernel* get = driver_function<GetKernel>("cuLibraryGetKernel");
};

}  // namespace

cudaError_t load_kernel(JitKernel& kernel) {
  static std::mutex mutex;
  static const Driver driver;
  static std::map<const void*, Driver::Library> libraries;  // by cubin; never unloaded, like the modules of programs

  const std::lock_guard lock(mutex);
  if (!kernel.function) {
    if (!driver.load || !driver.get) return cudaErrorInsufficientDriver;
    const auto [entry, fresh] = libraries.try_emplace(kernel.cubin, nullptr);
    if (fresh) {
      if (const int error = driver.load(&entry->second, kernel.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0)) {
        libraries.erase(entry);
        return static_cast<cudaError_t>(error);  // The runtime and the driver share error codes.
      }
    }
    if (const int error = driver.get(&kernel.function, entry->second, kernel.name)) return static_cast<cudaError_t>(error);
  }
  cudaFuncAttributes attributes;  // The query of attributes loads the kernel on this device.
  return cudaFuncGetAttributes(&attributes, kernel.function);
}

}  // namespace hw
