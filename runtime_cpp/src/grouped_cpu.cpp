#include "hostweave/grouped.h"

#ifdef HOSTWEAVE_CPU_DEVICE
#include <hostweave_cpu.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "hostweave/index.h"

namespace hw {
namespace {

struct Call {
  GroupedTypes types;
  GroupedProblem problem;

  const void* x(int64_t row) const { return at(problem.x, row * problem.x_pitch, types.operands); }
  const void* other(int64_t row) const { return at(problem.other, row * problem.other_pitch, types.operands); }
  const void* matrix(int64_t group) const { return at(problem.other, group * problem.other_stride, types.operands); }
  void* result(int64_t offset) const { return const_cast<void*>(at(problem.result, offset, types.result)); }

  static const void* at(const void* base, int64_t offset, cudaDataType_t dtype) {
    return static_cast<const char*>(base) + offset * static_cast<int64_t>(bytes_of(dtype));
  }
};

void fill(const Call& call, int64_t begin, int64_t end) {
  const GroupedProblem& p = call.problem;
  for (int64_t row = begin; row < end; ++row) {
    std::memset(call.result(row * p.result_pitch), 0, p.columns * bytes_of(call.types.result));
  }
}

void multiply(const Call& call) {
  const auto& [types, p] = call;
  int64_t last = 0, done = 0;  // greatest global end so far; number of local rows written so far
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t start = p.starts[e], end = p.ends[e];
    if (end < start || start < std::min(last, end)) {
      throw std::out_of_range("groups overlap: one has rows " + std::to_string(start) + " to " + std::to_string(end) +
                              ", and the one before ends at " + std::to_string(last) + "; offsets must not decrease");
    }
    last = std::max(last, end);
    const int64_t begin = clamped(start - p.first, 0, p.rows), stop = clamped(end - p.first, 0, p.rows);
    const int64_t count = std::max<int64_t>(stop - begin, 0);
    if (p.outer) {
      void* const to = call.result(e * p.result_stride);
      hw_cpu_product(types.operands, call.x(begin), p.x_pitch, true, call.other(begin), p.other_pitch, false, types.result, to,
                     p.result_pitch, p.depth, p.columns, count);
    } else if (count > 0) {
      fill(call, done, begin);
      hw_cpu_product(types.operands, call.x(begin), p.x_pitch, false, call.matrix(e), p.other_pitch, p.transposed, types.result,
                     call.result(begin * p.result_pitch), p.result_pitch, count, p.columns, p.depth);
      done = stop;
    }
  }
  if (!p.outer) fill(call, done, p.rows);
}

hw_cpu_range range(const void* at, cudaDataType_t dtype, int64_t rows, int64_t columns, int64_t pitch, int write = 0) {
  return {at, columns * bytes_of(dtype), static_cast<size_t>(rows), pitch * bytes_of(dtype), write};
}

}  // namespace

void load_grouped(const GroupedTypes&, const GroupedProblem&) {}

cudaError_t launch_grouped(const GroupedTypes& types, const GroupedProblem& problem, cudaStream_t stream) {
  const Call call{types, problem};
  const GroupedProblem& p = problem;
  std::vector<hw_cpu_range> ranges{range(p.x, types.operands, p.rows, p.depth, p.x_pitch),
                                   {p.starts, p.groups * sizeof(int32_t), 1, 0, 0},
                                   {p.ends, p.groups * sizeof(int32_t), 1, 0, 0}};
  if (p.outer) ranges.push_back(range(p.other, types.operands, p.rows, p.columns, p.other_pitch));
  if (!p.outer) ranges.push_back(range(p.result, types.result, p.rows, p.columns, p.result_pitch, 1));
  for (int64_t e = 0; e < p.groups; ++e) {
    if (p.outer) {
      ranges.push_back(range(call.result(e * p.result_stride), types.result, p.depth, p.columns, p.result_pitch, 1));
    } else {
      const auto [rows, columns] = p.transposed ? std::pair(p.columns, p.depth) : std::pair(p.depth, p.columns);
      ranges.push_back(range(call.matrix(e), types.operands, rows, columns, p.other_pitch));
    }
  }
  std::erase_if(ranges, [](const hw_cpu_range& each) { return each.bytes == 0 || each.rows == 0; });
  const auto run = [](void* closure) { multiply(*static_cast<const Call*>(closure)); };
  return hw_cpu_launch("grouped matmul", stream, run, &call, sizeof call, ranges.data(), static_cast<int>(ranges.size()), 4);
}

}  // namespace hw

#else
#include "hostweave/errors.h"

namespace hw {

void load_grouped(const GroupedTypes&, const GroupedProblem&) {
  throw ExecutionError("grouped matmul: its kernel was not built, because nvcc was missing: build with nvcc");
}
cudaError_t launch_grouped(const GroupedTypes&, const GroupedProblem&, cudaStream_t) { return cudaErrorNotSupported; }

}  // namespace hw

#endif
