// Functions of the CUDA driver by name, because programs are not linked to the driver.
#pragma once
#include <dlfcn.h>

namespace hw {

// Returns null if this machine has no driver, or if the driver lacks the function.
template <class Function>
Function* driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? reinterpret_cast<Function*>(dlsym(driver, name)) : nullptr;
}

}  // namespace hw
