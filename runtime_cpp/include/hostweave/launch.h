// Launches of kernels: hw::launch(kernel, grid, stream, arguments...) is kernel<<<blocks, threads, 0, stream>>>(arguments...), in
// plain C++. hw::launch_pdl is that for a kernel which begins with hw::griddep_wait(): its thread blocks launch while
// what is before it on the stream ends, which saves about a microsecond. The CPU device checks the order of accesses: generated
// kernels say themselves which elements they touch, by HW_TOUCHES, and the launch of a kernel of the user does, by hw::reads and
// hw::writes.
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

#ifndef __global__  // only a CUDA compiler knows the word; the CPU device runs a kernel as one thread of one block
#define __global__
#endif

namespace hw {

struct Grid {
  int64_t blocks;
  int threads;      // of a block
  int cluster = 1;  // neighbouring blocks that run together, where the device has clusters; elsewhere it is one block instead
  bool at_once = false;  // all blocks, of which there are no more then than the device has multiprocessors
};

constexpr int64_t kMaxBlocks = 2147483647;            // a kernel walks what is left
constexpr int64_t kThreadsAtOnce = int64_t{1} << 16;  // that keep the memory of a large GPU busy
constexpr int64_t kBlocksAtOnce = 128;
constexpr int64_t kProductsAtOnce = 264;  // blocks of kProductThreads: two a multiprocessor of an H200
constexpr int kMostBlocks = 8;            // of a cluster, on every device that has clusters
constexpr int64_t kBlocksOfOrders = 264;  // of kRowThreads, that run at once
constexpr int64_t kOrderedByAll = 65536;  // elements of a row, at least, for each of the rows that all blocks order

constexpr int warps_of(int64_t threads, int64_t most) {
  return static_cast<int>(clamped(ceil_div(threads, 32), 1, most / 32) * 32);
}

// A thread for each kWidth of n elements. Few of them are spread over more blocks.
template <int kWidth = 1>
constexpr Grid grid_of_elements(int64_t n) {
  const int threads = warps_of(ceil_div(n, kWidth * kBlocksAtOnce), kThreads);
  return {smaller(ceil_div(n, threads * kWidth), kMaxBlocks), threads};
}

// A block for each row of n elements. Where there are many rows, a thread takes kWidth elements up to kRowAccesses times.
template <int kWidth = 1>
constexpr Grid grid_of_rows(int64_t rows, int64_t n) {
  const int64_t accesses = ceil_div(n, kWidth);
  const int64_t each = clamped(rows * accesses / kThreadsAtOnce, 1, kRowAccesses);
  return {smaller(rows, kMaxBlocks), warps_of(ceil_div(accesses, each), kRowThreads)};
}

// A cluster of blocks for each row of n elements of which the first ones are ordered, where more than one block has something to
// do, and has room. Long rows that are ordered whole are taken one after another, by all blocks, if there are few of them.
constexpr Grid grid_of_orders(int64_t rows, int64_t n, int64_t first) {
  const Grid row = grid_of_rows(rows, n);
  if (rows > 0 && n == first && rows <= n / kOrderedByAll) {
    return {.blocks = n / kSorted, .threads = kRowThreads, .at_once = true};
  }
  const int64_t most = clamped(kBlocksOfOrders / clamped(rows, 1, kBlocksOfOrders), 1, kMostBlocks);
  const int64_t cluster = clamped(ceil_div(n, kSorted), 1, most);
  return {row.blocks * cluster, row.threads, static_cast<int>(cluster)};
}

// A block for each tile of n columns.
constexpr Grid grid_of_columns(int64_t n, int threads) { return {smaller(ceil_div(n, kTile), kMaxBlocks), threads}; }

// A cluster of blocks for each kProductColumns columns of products of few rows: as many as run at once, and have something to
// do. Larger clusters do not fill every group of multiprocessors, so of these some room is left.
template <int kThreads = kProductThreads>
constexpr Grid grid_of_products(int64_t columns, int64_t depth) {
  constexpr int64_t kSize = kThreads / kProductThreads, kAtOnce = kProductsAtOnce / kSize;
  const int64_t clusters = ceil_div(columns, kProductColumns);
  int cluster = kMostBlocks;
  while (cluster > 1 && (clusters * cluster > kAtOnce - (cluster > 2 ? 24 / kSize : 0) || depth < 2 * cluster * kThreads)) {
    --cluster;
  }
  return {clusters * cluster, kThreads, cluster};
}

// Of one product: pairs of large blocks, where these are more threads that run at once.
constexpr Grid grid_of_product(int64_t columns, int64_t depth) {
  const Grid usual = grid_of_products(columns, depth), large = grid_of_products<kLargeProductThreads>(columns, depth);
  return large.cluster == 2 && large.blocks * large.threads > usual.blocks * usual.threads ? large : usual;
}

// What of an array a kernel touches: `count` elements in a row, or a view. Lives no longer than the call that it is an argument
// of.
using ViewDims = std::initializer_list<int64_t>;

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

  Access<const void> access;
  size_t itemsize;
};

using Accesses = std::initializer_list<AnyAccess>;

// Takes the accesses of a kernel that is launched, and returns true: then the kernel returns. False when it runs.
bool tell(Accesses accesses);

// Enqueues `run` on a copy of the closure: with these accesses, or with those that it tells if it has none.
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
inline AnyAccess any(int64_t) { return {{}, 1}; }  // an argument that points to nothing

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

// Loads a kernel on the current device, before any rank runs: to load one beside a running NCCL kernel can hang.
template <class... Params>
cudaError_t load(void (*kernel)(Params...)) {
#ifdef HOSTWEAVE_JIT
  return load_kernel(*reinterpret_cast<JitKernel*>(kernel));
#else
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
#endif
}

template <class... Params>
const void* function_of(void (*kernel)(Params...)) {
#ifdef HOSTWEAVE_JIT
  return reinterpret_cast<const JitKernel*>(kernel)->function;
#else
  return reinterpret_cast<const void*>(kernel);
#endif
}

// Whether hw::griddep_wait() waits in a kernel: those of a program are compiled for one architecture.
inline bool waits_for_stream(const void* function) {
  static const bool waits = [function] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, function) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  return waits;
}

template <class... Params>
cudaError_t launch_with(const cudaLaunchConfig_t& config, const void* function, Params... params) {
  void* pointers[] = {&params...};
  return cudaLaunchKernelExC(&config, function, pointers);
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  if (grid.blocks == 0) return cudaSuccess;
  const cudaLaunchConfig_t config{.gridDim = dim3(grid.blocks), .blockDim = dim3(grid.threads), .stream = stream};
  return launch_with<Params...>(config, function_of(kernel), static_cast<Params>(args)...);
}

// CUDA calls it cooperative.
template <class... Params, class... Args>
cudaError_t launch_at_once(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  int device = 0, most = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const cudaError_t status = cudaDeviceGetAttribute(&most, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeCooperative};
  attribute.val.cooperative = 1;
  const cudaLaunchConfig_t config{.gridDim = dim3(1, smaller(grid.blocks, most)),
                                  .blockDim = dim3(grid.threads),
                                  .stream = stream,
                                  .attrs = &attribute,
                                  .numAttrs = 1};
  return launch_with<Params...>(config, function_of(kernel), static_cast<Params>(args)...);
}

// CUDA calls it programmatic dependent launch.
template <class... Params, class... Args>
cudaError_t launch_pdl(void (*kernel)(Params...), Grid grid, cudaStream_t stream, const Args&... args) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.at_once) return launch_at_once(kernel, grid, stream, args...);
  const void* const function = function_of(kernel);
  const bool waits = waits_for_stream(function);
  const unsigned cluster = waits ? grid.cluster : 1;  // both came with compute capability 9.0
  cudaLaunchAttribute attributes[2] = {{.id = cudaLaunchAttributeProgrammaticStreamSerialization},
                                       {.id = cudaLaunchAttributeClusterDimension}};
  attributes[0].val.programmaticStreamSerializationAllowed = waits;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  const cudaLaunchConfig_t config{.gridDim = dim3(grid.blocks / grid.cluster * cluster),
                                  .blockDim = dim3(grid.threads),
                                  .stream = stream,
                                  .attrs = attributes,
                                  .numAttrs = cluster > 1 ? 2u : 1u};
  return launch_with<Params...>(config, function, static_cast<Params>(args)...);
}

#endif

}  // namespace hw
