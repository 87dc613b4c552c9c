// Threads that are not joined, because they may wait forever inside NCCL or CUDA for a peer, and objects that outlive main.
#pragma once
#include <functional>

namespace hw {

// Runs `work` on a new thread. Throws std::system_error if the thread cannot be created.
void in_background(std::function<void()> work);

// Waits until the threads of `in_background` have ended. Call this function before the process exits. If threads still run after
// `seconds`, the process will exit without destroying existing static objects. These threads may use static objects of NCCL
// and CUDA.
void finish_background(double seconds);

// The only object of type T with this tag. The object is made at the first call, and never destroyed.
template <class T, class Tag = T>
T& immortal() {
  static T& object = *new T;
  return object;
}

}  // namespace hw
