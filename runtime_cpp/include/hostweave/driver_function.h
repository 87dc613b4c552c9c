// Functions of the CUDA driver. Programs are not linked to the driver.
#pragma once

namespace hw {

// Address of the driver's function `name`, or null without a driver that has the function.
void* driver_address(const char* name);

template <class Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(driver_address(name));
}

}  // namespace hw
