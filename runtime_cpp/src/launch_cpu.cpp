#include "hostweave/launch.h"

namespace hw {
namespace {

struct Dim {
  int64_t size, stride;
};

// The dims from the widest stride to the narrowest, neighbours merged that one stride covers.
std::vector<Dim> merged(const ViewDims& shape, const ViewDims& strides) {
  std::vector<Dim> dims;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1) dims.push_back({shape[i], strides[i]});
  }
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

}  // namespace

void add_ranges(const void* pointer, size_t itemsize, bool write, const ViewDims& shape, const ViewDims& strides,
                std::vector<hw_cpu_range>& ranges) {
  if (std::count(shape.begin(), shape.end(), 0)) return;
  std::vector<Dim> dims = merged(shape, strides);
  hw_cpu_range range{pointer, itemsize, 1, 0, write};
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
    range.pointer = static_cast<const char*>(pointer) + offset * static_cast<int64_t>(itemsize);
    ranges.push_back(range);
  }
}

}  // namespace hw
