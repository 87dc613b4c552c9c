// NVTX ranges for CUDA profilers: one per call of a program or function, and one per HW_CHECK.
#pragma once

namespace hw {

#ifdef HOSTWEAVE_CPU_DEVICE  // no CUDA profiler
struct Range {
  explicit Range(const char*) {}
  ~Range() {}  // avoids warnings about unused variables
};
#else
class Range {
 public:
  explicit Range(const char* name);
  ~Range();
  Range(Range&&) = delete;
};
#endif

}  // namespace hw
