#include <cuda.h>

#include <type_traits>

#include "hostweave/check.h"
#include "hostweave/driver_function.h"
#include "hostweave/grouped.h"
#include "hostweave/grouped_kernels.h"
#include "hostweave/launch.h"

namespace hw {

#define HW_GROUPED(name, T) __global__ void name(GroupedProblem p, T);
#define HW_BY_WARPGROUPS(name, T) __global__ void name(GroupedProblem p, GroupedMaps maps, T);
#define HW_ALL_GROUPED(T)                                       \
  HW_GROUPED(multiply_groups_by_16, T)                          \
  HW_GROUPED(multiply_groups_by_64, T)                          \
  HW_GROUPED(multiply_groups_by_128, T)                         \
  HW_GROUPED(multiply_groups_transposed_by_16, T)               \
  HW_GROUPED(multiply_groups_transposed_by_64, T)               \
  HW_GROUPED(multiply_groups_transposed_by_128, T)              \
  HW_GROUPED(multiply_rows_of_groups, T)                        \
  HW_BY_WARPGROUPS(multiply_groups_by_warpgroups, T)            \
  HW_BY_WARPGROUPS(multiply_groups_transposed_by_warpgroups, T) \
  HW_BY_WARPGROUPS(multiply_rows_of_groups_by_warpgroups, T)    \
  HW_BY_WARPGROUPS(multiply_few_rows_of_groups_by_warpgroups, T)
HW_ALL_GROUPED(bf16)
HW_ALL_GROUPED(f16)
HW_GROUPED(multiply_groups_plain, float)
HW_GROUPED(multiply_groups_plain, double)

namespace {

// Possible numbers of rows of a tile. There are kernels for each number. Groups with few rows need small tiles.
constexpr int kTileRows[] = {16, 64, 128};
constexpr int64_t kColumns = 128, kPlainSide = 64;

template <class T>
struct Chosen {
  void (*kernel)(GroupedProblem, T);
  int64_t rows, columns;  // size of a tile
};
template <class T>
using WarpgroupKernel = void (*)(GroupedProblem, GroupedMaps, T);

// Only Hopper has warpgroup matrix instructions. The result is cached, because a process uses GPUs of one kind.
bool has_warpgroups() {
  static const bool has = attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
                          attribute_of_device(cudaDevAttrComputeCapabilityMinor, -1) == 0;
  return has;
}

// The tensor memory accelerator needs a positive stride in each dim of more than one element.
bool has_strides(int64_t matrices, int64_t rows, int64_t stride, int64_t pitch) {
  return smaller(matrices, rows) > 0 && (rows == 1 || pitch > 0) && (matrices == 1 || stride > 0);
}

// True if a product that sums over the rows of groups has few terms per group on average.
bool has_few_rows(const GroupedProblem& p) { return p.outer && p.rows <= kFewRowsOfGroup * p.groups; }

// Returns the kernel for warpgroups, or null if this kernel cannot compute the problem or is slower. Tensor maps need aligned,
// non-empty arrays.
template <class T>
WarpgroupKernel<T> warpgroup_kernel(const GroupedProblem& p) {
  if constexpr (sizeof(T) == 2) {
    const int64_t matrices = p.outer ? 1 : p.groups, rows_of_other = p.transposed ? p.columns : p.outer ? p.rows : p.depth;
    if (!p.wide || !has_warpgroups() || smaller(smaller(p.groups, p.depth), p.columns) == 0 ||
        !has_strides(1, p.rows, 0, p.x_pitch) || !has_strides(matrices, rows_of_other, p.other_stride, p.other_pitch)) {
      return nullptr;
    }
    const bool fills_gpu = smaller(p.rows, p.groups) * ceil_div(p.columns, kWarpgroupColumns) >= multiprocessors();
    if (!p.outer && ceil_div(p.rows, p.groups) <= kTileRows[0] && !fills_gpu) return nullptr;
    static constexpr WarpgroupKernel<T> kKernels[] = {multiply_groups_by_warpgroups, multiply_groups_transposed_by_warpgroups,
                                                      multiply_rows_of_groups_by_warpgroups,
                                                      multiply_few_rows_of_groups_by_warpgroups};
    return kKernels[p.outer ? 2 + has_few_rows(p) : p.transposed];
  }
  return nullptr;
}

template <class T>
Chosen<T> chosen(const GroupedProblem& p) {
  if constexpr (sizeof(T) > 2) {
    return {multiply_groups_plain, kPlainSide, kPlainSide};
  } else {
    if (p.outer) return {multiply_rows_of_groups, kTileRows[2], kColumns};
    static constexpr void (*kKernels[2][3])(GroupedProblem, T) = {
        {multiply_groups_by_16, multiply_groups_by_64, multiply_groups_by_128},
        {multiply_groups_transposed_by_16, multiply_groups_transposed_by_64, multiply_groups_transposed_by_128}};
    const int64_t each = ceil_div(p.rows, smaller(p.rows, p.groups) > 0 ? p.groups : 1);  // rows of a group, on average
    const int size = each <= kTileRows[0] ? 0 : each <= kTileRows[1] ? 1 : 2;
    return {kKernels[p.transposed][size], kTileRows[size], kColumns};
  }
}

// Describes an array of matrices with 16-bit elements. One copy moves a box: 64 elements of each of `box_rows` rows.
template <class T>
cudaError_t set_map(TensorMap& map, const void* at, int64_t matrices, int64_t rows, int64_t columns, int64_t stride,
                    int64_t pitch, uint32_t box_rows, T) {
  static auto* const encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  if (encode == nullptr) return cudaErrorCallRequiresNewerDriver;
  if (rows == 1) pitch = ceil_div(columns, 8) * 8;  // A dim with one element may have any valid stride.
  if (matrices == 1) stride = rows * pitch;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch * 2), static_cast<cuuint64_t>(stride * 2)};
  const cuuint32_t box[] = {64, box_rows, 1}, steps[] = {1, 1, 1};
  const CUresult status =
      encode(reinterpret_cast<CUtensorMap*>(&map),
             std::is_same_v<T, f16> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
             const_cast<void*>(at), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T>
cudaError_t set_maps(GroupedMaps& maps, const GroupedProblem& p) {
  const int64_t matrices = p.outer ? 1 : p.groups, depth = p.outer ? p.rows : p.depth;  // sizes of the other operand
  const uint32_t box_rows = has_few_rows(p) ? kFewBoxRows : 64;
  const cudaError_t statuses[] = {
      set_map(maps.x, p.x, 1, p.rows, p.depth, 0, p.x_pitch, box_rows, T()),
      p.transposed
          ? set_map(maps.other, p.other, matrices, p.columns, depth, p.other_stride, p.other_pitch, kWarpgroupColumns, T())
          : set_map(maps.other, p.other, matrices, depth, p.columns, p.other_stride, p.other_pitch, box_rows, T()),
      set_map(maps.result, p.result, p.outer ? p.groups : 1, p.outer ? p.depth : p.rows, p.columns, p.result_stride,
              p.result_pitch, 64, T())};
  for (const cudaError_t status : statuses) {
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Upper bound for the number of tiles of the result.
int64_t tiles_of(const GroupedProblem& p, int64_t rows, int64_t columns) {
  const int64_t down = p.outer ? p.groups * ceil_div(p.depth, rows) : ceil_div(p.rows, rows) + p.groups;
  return down * ceil_div(p.columns, columns);
}

template <class T>
void load_as(const GroupedProblem& p) {
  if (const auto kernel = warpgroup_kernel<T>(p)) {
    HW_CHECK(load(kernel));
    HW_CHECK(cudaFuncSetAttribute(function_of(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, kWarpgroupShared));
  } else {
    HW_CHECK(load(chosen<T>(p).kernel));
  }
}

template <class T>
cudaError_t launch_as(const GroupedProblem& p, cudaStream_t stream) {
  if (const auto kernel = warpgroup_kernel<T>(p)) {
    const int64_t tiles = tiles_of(p, kWarpgroupRows, kWarpgroupColumns), most = multiprocessors();
    const Grid grid{.blocks = clamped(tiles, 1, most), .threads = kWarpgroupThreads, .shared = kWarpgroupShared};
    GroupedMaps maps;
    if (const cudaError_t status = set_maps<T>(maps, p); status != cudaSuccess) return status;
    // With a programmatic launch, blocks start in the order in which blocks of the previous kernel end. In this order, large
    // products took up to 10% longer.
    return tiles > 4 * most ? launch(kernel, grid, stream, p, maps, T()) : launch_pdl(kernel, grid, stream, p, maps, T());
  }
  const Chosen<T> of = chosen<T>(p);
  const int64_t blocks = clamped(tiles_of(p, of.rows, of.columns), 1, blocks_at_once());
  return launch_pdl(of.kernel, Grid{.blocks = blocks, .threads = kGroupedThreads}, stream, p, T());
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
  GroupedProblem unaligned = problem;  // The operands of a call may be unaligned.
  unaligned.wide = false;
  for_dtype(types.operands, [&]<class T>(T) { load_as<T>(problem), load_as<T>(unaligned); });
}

cudaError_t launch_grouped(const GroupedTypes& types, const GroupedProblem& problem, cudaStream_t stream) {
  return for_dtype(types.operands, [&]<class T>(T) { return launch_as<T>(problem, stream); });
}

}  // namespace hw
