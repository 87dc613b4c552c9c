// Function for the Python module of a wheel. The C API of programs lacks this function.
#include <cuda_runtime_api.h>

#include "hostweave/c_api.h"
#include "hostweave/check.h"

// Waits until the current device has finished all calls.
extern "C" hw_status hw_wheel_synchronize() {
  return hw::c::guarded([] { HW_CHECK(cudaDeviceSynchronize()); });
}
