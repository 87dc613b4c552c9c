// Ranges of NVTX, which profilers of CUDA show: of a call of a program, of each function of it, and of each call of a library in
// these.
#pragma once

namespace hw {

#ifdef HOSTWEAVE_CPU_DEVICE  // which no profiler of CUDA sees
struct Range {
  explicit Range(const char*) {}
  ~Range() {}  // so that a variable counts as used
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
