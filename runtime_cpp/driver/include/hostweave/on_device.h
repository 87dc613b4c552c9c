// The thread's current device, for a while.
#pragma once

namespace hw {

// Makes a device current; the one before is current again afterwards, unless nothing has used that yet: on CUDA, naming a
// device is enough to set it up, which takes time and memory.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_;
};

}  // namespace hw
