// Kernel launches in plain C++. hw::launch(kernel, grid, stream, args...) is
// kernel<<<blocks, threads, shared, stream>>>(args...). hw::launch_pdl launches kernels that call hw::griddep_wait(). It uses
// programmatic dependent launch for kernels compiled for compute capability 9.0 or later, unless `at_once` is set. A programmatic
// dependent launch saves about a microsecond: blocks of the kernel may start before earlier work on the stream has ended. The CPU
// device uses declared accesses to detect races. Generated kernels declare accesses by HW_TOUCHES. Launches of user kernels use
// hw::reads and hw::writes.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "hostweave/index.h"
#include "hostweave/threads.h"

#ifdef HOSTWEAVE_CPU_DEVICE
#include <hostweave_cpu.h>

#include "hostweave/terms.h"
#endif
#ifdef HOSTWEAVE_JIT
#include "hostweave/jit.h"
#endif

#ifndef __global__  // Host compilers lack this keyword. The CPU device runs a kernel as one thread of one block.
#define __global__
#endif

namespace hw {

// hw::launch ignores cluster and at_once. hw::launch_pdl ignores cluster if at_once is set.
struct Grid {
  int64_t blocks;
  int threads;           // per block
  int cluster = 1;       // blocks per cluster
  bool at_once = false;  // cooperative launch, with at most one block per multiprocessor
  int shared = 0;        // bytes of dynamic shared memory
};

// maximum number of blocks of a grid; loops with a grid stride cover larger ranges
constexpr int64_t kMaxBlocks = 2147483647;
constexpr int64_t kThreadsAtOnce = int64_t{1} << 16;  // enough threads to saturate the memory of a large GPU
constexpr int64_t kBlocksAtOnce = 128;
constexpr int kMostBlocks = 8;  // portable maximum cluster size
// The whole grid sorts each row if all elements are sorted, and (row length) / (number of rows) is at least this number.
constexpr int64_t kOrderedByAll = 65536;

#ifdef HOSTWEAVE_CPU_DEVICE
inline int64_t multiprocessors() { return 1; }
#else
// Attribute of the current device; `otherwise` if CUDA fails.
inline int attribute_of_device(cudaDeviceAttr attribute, int otherwise = 0) {
  int device = 0, found = 0;
  const bool is_known = cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&found, attribute, device) == cudaSuccess;
  return is_known ? found : otherwise;
}

// Number of multiprocessors of each GPU. A process uses GPUs of one kind.
inline int64_t multiprocessors() {
  static const int64_t count = attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  return count;
}
#endif

// Number of blocks that run at once, with kProductThreads or kRowThreads threads per block: two per multiprocessor.
inline int64_t blocks_at_once() { return 2 * multiprocessors(); }

constexpr int warps_of(int64_t threads, int64_t most) {
  return static_cast<int>(clamped(ceil_div(threads, 32), 1, most / 32) * 32);
}

// One thread per kWidth of n elements. If there are few elements, the blocks have fewer threads.
template <int kWidth = 1>
constexpr Grid grid_of_elements(int64_t n) {
  const int threads = warps_of(ceil_div(n, kWidth * kBlocksAtOnce), kThreads);
  return {smaller(ceil_div(n, threads * kWidth), kMaxBlocks), threads};
}

// One block per row of n elements. With many rows, blocks have fewer threads. A thread makes up to kRowAccesses accesses, or more
// in long rows.
template <int kWidth = 1>
constexpr Grid grid_of_rows(int64_t rows, int64_t n) {
  const int64_t accesses = ceil_div(n, kWidth);
  const int64_t each = clamped(rows * accesses / kThreadsAtOnce, 1, kRowAccesses);
  return {smaller(rows, kMaxBlocks), warps_of(ceil_div(accesses, each), kRowThreads)};
}

// Grid of a kernel that finds the first `first` of n elements of each row in sorted order. If all elements are sorted and the
// rows are few and long, the whole grid sorts each row. Otherwise a cluster sorts each row. The cluster has one block per kSorted
// elements, up to a limit that falls with the number of rows.
inline Grid grid_of_orders(int64_t rows, int64_t n, int64_t first) {
  const Grid row = grid_of_rows(rows, n);
  if (rows > 0 && n == first && rows <= n / kOrderedByAll) {
    return {.blocks = n / kSorted, .threads = kRowThreads, .at_once = true};
  }
  const int64_t most = clamped(blocks_at_once() / clamped(rows, 1, blocks_at_once()), 1, kMostBlocks);
  const int64_t cluster = clamped(ceil_div(n, kSorted), 1, most);
  return {row.blocks * cluster, row.threads, static_cast<int>(cluster)};
}

// One block per kTile of n columns.
constexpr Grid grid_of_columns(int64_t n, int threads) { return {smaller(ceil_div(n, kTile), kMaxBlocks), threads}; }

// One block per tile that is transposed, for results of kBytes bytes per element.
template <int kBytes>
constexpr Grid grid_of_tiles(int64_t rows, int64_t columns) {
  return {smaller(ceil_div(rows, kTileRows<kBytes>) * ceil_div(columns, kTransposed), kMaxBlocks), kThreads};
}

// Grid of matmuls with few rows: one cluster per kProductColumns columns. The cluster has as many blocks as possible, up to
// kMostBlocks. A cluster of several blocks needs enough terms per block, and all blocks must then run at once. Clusters of more
// than two blocks cannot fill every GPC, so fewer blocks run at once.
template <int kThreads = kProductThreads, int64_t kSize = kThreads / kProductThreads>
inline Grid grid_of_products(int64_t columns, int64_t depth) {
  const int64_t clusters = ceil_div(columns, kProductColumns);
  int cluster = kMostBlocks;
  while (cluster > 1 &&
         (clusters * cluster > blocks_at_once() / kSize - (cluster > 2 ? 24 / kSize : 0) || depth < 2 * cluster * kThreads)) {
    --cluster;
  }
  return {clusters * cluster, kThreads, cluster};
}

// Grid of one matmul with few rows: clusters of two large blocks if they have more threads, otherwise grid_of_products.
inline Grid grid_of_product(int64_t columns, int64_t depth) {
  const Grid usual = grid_of_products(columns, depth), large = grid_of_products<kLargeProductThreads>(columns, depth);
  return large.cluster == 2 && large.blocks * large.threads > usual.blocks * usual.threads ? large : usual;
}

using ViewDims = std::initializer_list<int64_t>;

// Elements that a kernel accesses: `count` contiguous elements, or a view. `shape` and `strides` refer to temporaries, so use
// this type only for arguments.
template <class T>
struct Access {
  T* pointer;
  bool write;
  int64_t count;                      // negative for a view
  ViewDims shape = {}, strides = {};  // in elements

  operator T*() const { return pointer; }
};

template <class T>
Access<const T> reads(const T* pointer, ViewDims shape, ViewDims strides) {
  return {pointer, false, -1, shape, strides};
}
template <class T>
Access<const T> reads(const T* pointer, int64_t count) {
  return {pointer, false, count};
}
template <class T>
Access<T> writes(T* pointer, ViewDims shape, ViewDims strides) {
  return {pointer, true, -1, shape, strides};
}
template <class T>
Access<T> writes(T* pointer, int64_t count) {
  return {pointer, true, count};
}

#ifdef HOSTWEAVE_CPU_DEVICE

struct AnyAccess {
  AnyAccess(const Access<const void>& access, size_t itemsize) : access(access), itemsize(itemsize) {}
  template <class T>
  AnyAccess(const Access<T>& of) : access{of.pointer, of.write, of.count, of.shape, of.strides}, itemsize(sizeof(T)) {}
  template <class T, int kRanks>
  AnyAccess(const Terms<T, kRanks>& terms) : AnyAccess(reads(terms.gathered, kRanks * terms.count)) {}
  template <class T, int kRanks, bool kSums>
  AnyAccess(const LandedBlocks<T, kRanks, kSums>& blocks) : AnyAccess(reads(blocks.gathered, kRanks * blocks.count)) {}
  template <class T, int kRanks>
  AnyAccess(const SentBlocks<T, kRanks>& sent) : AnyAccess(writes(sent.own, kRanks * sent.blocks.count)) {}

  Access<const void> access;
  size_t itemsize;
};

using Accesses = std::initializer_list<AnyAccess>;

// A kernel calls tell() first. During a launch, tell() records the accesses and returns true. The kernel then returns
// immediately.
bool tell(Accesses accesses);

// Enqueues `run` with a copy of the closure. If `accesses` is empty, the kernel declares its accesses by `tell`.
cudaError_t launch_on_cpu(cudaStream_t stream, void (*run)(void* closure), void* closure, size_t closure_bytes,
                          Accesses accesses);

template <class T>
constexpr bool is_access = false;
template <class T>
constexpr bool is_access<Access<T>> = true;

template <class T>
AnyAccess any(const Access<T>& access) {
  return access;
}
inline AnyAccess any(int64_t) { return {{}, 1}; }  // an argument that is not a pointer

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  if (grid.blocks == 0) return cudaSuccess;
  auto call = [kernel, ... params = static_cast<Params>(args)] { kernel(params...); };
  const auto run = [](void* copied) { (*static_cast<decltype(call)*>(copied))(); };
  if constexpr ((is_access<Args> || ...)) {
    return launch_on_cpu(stream, run, &call, sizeof call, {any(args)...});
  } else {
    return launch_on_cpu(stream, run, &call, sizeof call, {});
  }
}

template <class... Params, class... Args>
cudaError_t launch_pdl(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  return launch(kernel, grid, stream, args...);
}

template <class... Params>
cudaError_t load(void (*)(Params...)) {
  return cudaSuccess;
}

#else

// Loads a kernel on the current device. Call this function before any rank runs, because lazy loading during an NCCL kernel can
// deadlock.
template <class... Params>
cudaError_t load(void (*kernel)(Params...)) {
#ifdef HOSTWEAVE_JIT
  return load_kernel(*reinterpret_cast<JitKernel*>(kernel));
#else
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
#endif
}

template <class Kernel, size_t n>
cudaError_t load_all(const Kernel (&kernels)[n]) {
  for (const Kernel kernel : kernels) {
    if (const cudaError_t status = load(kernel); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <class... Params>
const void* function_of(void (*kernel)(Params...)) {
#ifdef HOSTWEAVE_JIT
  return reinterpret_cast<const JitKernel*>(kernel)->function;
#else
  return reinterpret_cast<const void*>(kernel);
#endif
}

// True if the program's kernels are compiled for an architecture with programmatic dependent launch.
inline bool waits_for_stream(const void* function) {
  static const bool waits = [function] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, function) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  return waits;
}

// Launches `blocks` blocks of the kernel `function`. Ignores grid.blocks, cluster and at_once.
template <class... Params>
cudaError_t launch_with(const void* function, dim3 blocks, const Grid& grid, cudaStream_t stream, cudaLaunchAttribute* attributes,
                        unsigned attribute_count, Params... params) {
  void* pointers[] = {&params...};
  const cudaLaunchConfig_t config{.gridDim = blocks,
                                  .blockDim = dim3(grid.threads),
                                  .dynamicSmemBytes = static_cast<size_t>(grid.shared),
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = attribute_count};
  return cudaLaunchKernelExC(&config, function, pointers);
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  if (grid.blocks == 0) return cudaSuccess;
  return launch_with<Params...>(function_of(kernel), dim3(grid.blocks), grid, stream, nullptr, 0, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t launch_pdl(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  if (grid.blocks == 0) return cudaSuccess;
  const void* const function = function_of(kernel);
  if (grid.at_once) {
    cudaLaunchAttribute attribute{.id = cudaLaunchAttributeCooperative};
    attribute.val.cooperative = 1;
    const dim3 blocks(1, smaller(grid.blocks, multiprocessors()));
    return launch_with<Params...>(function, blocks, grid, stream, &attribute, 1, static_cast<Params>(args)...);
  }
  const bool waits = waits_for_stream(function);
  const unsigned cluster = waits ? grid.cluster : 1;  // Clusters, like programmatic launches, need compute capability 9.0.
  cudaLaunchAttribute attributes[2] = {{.id = cudaLaunchAttributeProgrammaticStreamSerialization},
                                       {.id = cudaLaunchAttributeClusterDimension}};
  attributes[0].val.programmaticStreamSerializationAllowed = waits;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  const dim3 blocks(grid.blocks / grid.cluster * cluster);
  return launch_with<Params...>(function, blocks, grid, stream, attributes, cluster > 1 ? 2 : 1, static_cast<Params>(args)...);
}

#endif

}  // namespace hw
