#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/grouped.h"
#include "hostweave/grouped_kernels.h"
#include "hostweave/launch.h"

namespace hw {

#define HW_GROUPED(name, T) __global__ void name(GroupedProblem p, T);
#define HW_ALL_GROUPED(T)                                 \
  HW_GROUPED(multiply_groups_by_16, T)                    \
  HW_GROUPED(multiply_groups_by_64, T)                    \
  HW_GROUPED(multiply_groups_by_128, T)                   \
  HW_GROUPED(multiply_groups_transposed_by_16, T)         \
  HW_GROUPED(multiply_groups_transposed_by_64, T)         \
  HW_GROUPED(multiply_groups_transposed_by_128, T)        \
  HW_GROUPED(multiply_groups_by_warpgroups, T)            \
  HW_GROUPED(multiply_groups_transposed_by_warpgroups, T) \
  HW_GROUPED(multiply_rows_of_groups, T)                  \
  HW_GROUPED(multiply_rows_of_groups_by_warpgroups, T)
HW_ALL_GROUPED(bf16)
HW_ALL_GROUPED(f16)
HW_GROUPED(multiply_groups_plain, float)
HW_GROUPED(multiply_groups_plain, double)

namespace {

// Kernels by the rows of a tile: groups of few rows have small tiles.
constexpr int kTileRows[] = {16, 64, 128};
constexpr int64_t kColumns = 128, kPlainSide = 64;
constexpr int kBlocksEach = 2;  // of a multiprocessor

template <class T>
using Kernel = void (*)(GroupedProblem, T);

template <class T>
struct Chosen {
  Kernel<T> kernel;
  int64_t rows, columns;  // of a tile
  int blocks_each = kBlocksEach;
  int shared = 0;  // bytes of dynamic shared memory
};

int64_t processors() { return blocks_at_once() / 2; }

// Hopper has products of warpgroups. A process uses GPUs of one kind.
bool has_warpgroups() {
  static const bool has = [] {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0;
  }();
  return has;
}

template <class T>
Chosen<T> chosen(const GroupedProblem& p) {
  const int64_t each = ceil_div(p.rows, smaller(p.rows, p.groups) > 0 ? p.groups : 1);  // rows of a group, on average
  const bool fills_gpu = smaller(p.rows, p.groups) * ceil_div(p.columns, kWarpgroupColumns) >= processors();
  if (p.wide && has_warpgroups() && (p.outer || each > kTileRows[0] || fills_gpu)) {
    static constexpr Kernel<T> kKernels[] = {multiply_groups_by_warpgroups, multiply_groups_transposed_by_warpgroups,
                                             multiply_rows_of_groups_by_warpgroups};
    return {kKernels[p.outer ? 2 : p.transposed], kWarpgroupRows, kWarpgroupColumns, 1, kWarpgroupShared};
  }
  if (p.outer) return {multiply_rows_of_groups, kTileRows[2], kColumns};
  static constexpr Kernel<T> kKernels[2][3] = {
      {multiply_groups_by_16, multiply_groups_by_64, multiply_groups_by_128},
      {multiply_groups_transposed_by_16, multiply_groups_transposed_by_64, multiply_groups_transposed_by_128}};
  const int size = each <= kTileRows[0] ? 0 : each <= kTileRows[1] ? 1 : 2;
  return {kKernels[p.transposed][size], kTileRows[size], kColumns};
}
template <>
Chosen<float> chosen<float>(const GroupedProblem&) {
  return {multiply_groups_plain, kPlainSide, kPlainSide};
}
template <>
Chosen<double> chosen<double>(const GroupedProblem&) {
  return {multiply_groups_plain, kPlainSide, kPlainSide};
}

template <class T>
void load_as(const GroupedProblem& p) {
  const Chosen<T> of = chosen<T>(p);
  HW_CHECK(load(of.kernel));
  if (of.shared > 0) {
    HW_CHECK(cudaFuncSetAttribute(function_of(of.kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, of.shared));
  }
}

template <class T>
cudaError_t launch_as(const GroupedProblem& p, cudaStream_t stream) {
  const Chosen<T> of = chosen<T>(p);
  const int64_t down = p.outer ? p.groups * ceil_div(p.depth, of.rows) : ceil_div(p.rows, of.rows) + p.groups;
  const int64_t tiles = down * ceil_div(p.columns, of.columns);
  const int64_t blocks = clamped(tiles, 1, of.blocks_each * processors());
  return launch_pdl(of.kernel, Grid{.blocks = blocks, .threads = kGroupedThreads, .shared = of.shared}, stream, p, T());
}

template <class Use>
auto for_dtype(cudaDataType_t dtype, const Use& use) {
  if (dtype == CUDA_R_16BF) return use(bf16());
  if (dtype == CUDA_R_16F) return use(f16());
  if (dtype == CUDA_R_32F) return use(0.0f);
  return use(0.0);
}

}  // namespace

void load_grouped(const GroupedTypes& types, const GroupedProblem& problem) {
  GroupedProblem unaligned = problem;  // as a call may be
  unaligned.wide = false;
  for_dtype(types.operands, [&]<class T>(T) { load_as<T>(problem), load_as<T>(unaligned); });
}

cudaError_t launch_grouped(const GroupedTypes& types, const GroupedProblem& problem, cudaStream_t stream) {
  return for_dtype(types.operands, [&]<class T>(T) { return launch_as<T>(problem, stream); });
}

}  // namespace hw
