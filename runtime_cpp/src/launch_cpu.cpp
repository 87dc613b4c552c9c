#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "hostweave/launch.h"

namespace hw {
namespace {

struct Dim {
  int64_t size, stride;
};

// Dims sorted by decreasing stride, with adjacent dims merged if one stride covers both.
std::vector<Dim> merged(const Access<const void>& access) {
  std::vector<Dim> dims;
  if (access.count >= 0) dims.push_back({access.count, 1});
  for (size_t i = 0; i < access.shape.size(); ++i) dims.push_back({access.shape.begin()[i], access.strides.begin()[i]});
  std::erase_if(dims, [](const Dim& dim) { return dim.size == 1; });
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  std::vector<Dim> result;
  for (const Dim& dim : dims) {
    if (!result.empty() && result.back().stride == dim.size * dim.stride) {
      result.back() = {result.back().size * dim.size, dim.stride};
    } else {
      result.push_back(dim);
    }
  }
  return result;
}

void add_ranges(const Access<const void>& access, size_t itemsize, std::vector<hw_cpu_range>& ranges) {
  std::vector<Dim> dims = merged(access);
  if (!access.pointer || std::ranges::find(dims, 0, &Dim::size) != dims.end()) return;
  hw_cpu_range range{access.pointer, itemsize, 1, 0, access.write};
  if (!dims.empty() && dims.back().stride == 1) {
    range.bytes *= dims.back().size;
    dims.pop_back();
  }
  if (!dims.empty()) {
    range.rows = dims.back().size;
    range.pitch = dims.back().stride * itemsize;
    dims.pop_back();
  }
  int64_t pieces = 1;
  for (const Dim& dim : dims) pieces *= dim.size;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t rest = piece, offset = 0;
    for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
      offset += rest % dim->size * dim->stride;
      rest /= dim->size;
    }
    range.pointer = static_cast<const char*>(access.pointer) + offset * static_cast<int64_t>(itemsize);
    ranges.push_back(range);
  }
}

// List for the accesses of the kernel that this thread launches. The pointer is null if this thread launches no kernel.
thread_local std::optional<std::vector<hw_cpu_range>>* told = nullptr;

}  // namespace

void index_out_of_range(bool negative, uint64_t index, int64_t n) {
  const std::string text = negative ? std::to_string(static_cast<int64_t>(index)) : std::to_string(index);
  throw std::out_of_range("index " + text + " is out of range for a dim of " + std::to_string(n) + " elements");
}

bool tell(Accesses accesses) {
  if (!told) return false;
  told->emplace();
  for (const AnyAccess& each : accesses) add_ranges(each.access, each.itemsize, **told);
  return true;
}

cudaError_t launch_on_cpu(cudaStream_t stream, void (*run)(void* closure), void* closure, size_t closure_bytes,
                          Accesses accesses) {
  std::optional<std::vector<hw_cpu_range>> kept;
  told = &kept;
  if (accesses.size() > 0) {
    tell(accesses);
  } else {
    run(closure);
  }
  told = nullptr;
  if (!kept)
    throw std::logic_error("a kernel does not begin with HW_TOUCHES(...): it has to say which elements it reads and writes");
  return hw_cpu_launch("kernel", stream, run, closure, closure_bytes, kept->data(), static_cast<int>(kept->size()));
}

}  // namespace hw
