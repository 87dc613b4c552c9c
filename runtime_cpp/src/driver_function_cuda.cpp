#include <dlfcn.h>

#include "hostweave/driver_function.h"

void* hw::driver_address(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? dlsym(driver, name) : nullptr;
}
