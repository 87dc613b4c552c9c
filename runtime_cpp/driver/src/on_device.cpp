#include "hostweave/on_device.h"

#include <cuda_runtime_api.h>

#include "hostweave/check.h"
#include "world_target.h"

namespace hw {

OnDevice::OnDevice(int device) {
  HW_CHECK(cudaGetDevice(&before_));
  changed_ = device != before_;
  if (changed_) HW_CHECK(cudaSetDevice(device));
}

OnDevice::~OnDevice() {
  if (changed_ && target::is_set_up(before_)) cudaSetDevice(before_);
}

}  // namespace hw
