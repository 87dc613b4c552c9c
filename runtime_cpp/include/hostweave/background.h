// Threads that nobody joins, because they may wait inside NCCL or CUDA for a peer that never arrives.
#pragma once
#include <functional>

namespace hw {

// Runs `work` on a new thread. Throws std::system_error if there is no memory for a thread.
void in_background(std::function<void()> work);

// Call it before the process exits. Waits until the threads of this library have ended. If some still run after `seconds`, the
// process will end without destroying static objects, because the threads use static objects of NCCL and CUDA.
void finish_background(double seconds);

}  // namespace hw
