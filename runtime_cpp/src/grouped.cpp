#include "hostweave/grouped.h"

#include "hostweave/errors.h"

namespace hw {
namespace {

constexpr int64_t kWide = 16;  // bytes of a read

// Distance between adjacent elements along a dim. Returns 1 if the dim has at most one element; its stride may then have any
// value.
int64_t step(const Strided& x, int dim) { return x.shape[dim] <= 1 ? 1 : x.strides[dim]; }

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kWide == 0; }

}  // namespace

void GroupedPlan::prepare(const Strided& x, const Strided& other, const Strided& result) {
  GroupedProblem& p = shapes_ = {};
  p.outer = result.shape.ndim == 3;
  p.wide_result = types_.operands != types_.result;
  p.rows = x.shape[0], p.depth = x.shape[1], p.columns = result.shape[result.shape.ndim - 1];
  p.groups = p.outer ? result.shape[0] : other.shape[0];
  const int last = other.shape.ndim - 1;
  p.transposed = !p.outer && step(other, last) != 1;
  p.x_pitch = x.strides[0];
  p.other_pitch = other.strides[p.transposed ? last : last - 1];
  p.other_stride = p.outer ? 0 : other.strides[0];
  p.result_pitch = result.strides[p.outer ? 1 : 0];
  p.result_stride = p.outer ? result.strides[0] : 0;
  const bool is_matrix =
      step(x, 1) == 1 && step(result, result.shape.ndim - 1) == 1 && step(other, p.transposed ? last - 1 : last) == 1;
  if (!is_matrix)
    throw ExecutionError(
        "grouped matmul: the elements of a row are not contiguous: copy the array to or from a contiguous buffer");
  const auto elements = static_cast<int64_t>(kWide / bytes_of(types_.operands));
  p.wide = (p.x_pitch | p.other_pitch | p.other_stride | p.result_pitch | p.result_stride) % elements == 0;
  load_grouped(types_, p);
}

cudaError_t GroupedPlan::multiply(const void* x, const void* other, const int32_t* starts, const int32_t* ends, void* result,
                                  cudaStream_t stream, int64_t first) const {
  GroupedProblem p = shapes_;
  p.x = x, p.other = other, p.starts = starts, p.ends = ends, p.result = result, p.first = first;
  p.wide = p.wide && is_aligned(x) && is_aligned(other) && is_aligned(result);
  const bool is_empty = p.columns == 0 || (p.outer ? p.groups * p.depth : p.rows) == 0;
  return is_empty ? cudaSuccess : launch_grouped(types_, p, stream);
}

}  // namespace hw
