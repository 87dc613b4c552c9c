// What one rank owns, and its programs share.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "hostweave/channel.h"
#include "hostweave/hidden.h"

namespace hw {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // of one stream, for its matmuls

// A stream, and the workspace of the matmuls that run on it.
struct Stream {
  cudaStream_t handle = nullptr;
  void* workspace = nullptr;

  operator cudaStream_t() const { return handle; }
};

// Of a library, and what destroys it.
struct Handle {
  void* handle = nullptr;
  void (*destroy)(void* handle) = nullptr;
};

// One rank's device: its place in the world, library handle, streams and channels. Used by one thread at a time, with
// `device` current. Lives longer than the programs that are made with it.
class Rank {
 public:
  Rank(int device, int64_t index, int64_t size);
  ~Rank();

  int device() const { return device_; }
  int64_t index() const { return index_; }  // of the world: row-major coordinates of the mesh
  int64_t size() const { return size_; }
  // This rank. Throws ExecutionError unless the world has so many ranks.
  Rank& expect_world(int64_t size);

  // A channel is keyed by the mesh ("mesh(dp=2, tp=4)"), the axes of the process group ("tp", or "dp, tp") and the transport.
  void add_channel(const char* mesh, const char* axes, const Channel& channel, Transport transport = Transport::two_sided);
  bool has_channel(const char* mesh, const char* axes, Transport transport = Transport::two_sided) const;
  // Throws ExecutionError where there is none, or where its process group is not of this size.
  const Channel& channel(const char* mesh, const char* axes, int64_t size, Transport transport = Transport::two_sided) const;

  // Memory that all ranks share, until it is taken away. A call of a program names places in it.
  void share(SharedMemory memory);
  void unshare(const char* data);

  cublasLtHandle_t blas();  // made on first use
  // A handle of a library that only some programs use, null until one of them makes it.
  Handle& handle(const char* library);
  // The i-th stream of this name, made on first use. Programs that use the same name share them. Those on which the compiler has
  // nothing but communication, "comm", "puts" and "arrivals", have the highest priority.
  Stream stream(const char* name, int i);

  // Whether the plans that are made now measure the algorithms of a product, and take the fastest.
  bool measures() const { return measures_; }
  void set_measures(bool measures) { measures_ = measures; }

 private:
  struct Pools;
  int device_;
  int64_t index_;
  int64_t size_;
  bool measures_ = false;
  Hidden<Pools> pools_;
};

}  // namespace hw
