// Functions of the CUDA driver. Programs are not linked to the driver.
#pragma once
#include <dlfcn.h>

namespace hw {

// The driver's function `name`, or null without a driver that has the function.
template <class Function>
Function* driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? reinterpret_cast<Function*>(dlsym(driver, name)) : nullptr;
}

}  // namespace hw
