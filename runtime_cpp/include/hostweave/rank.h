// Resources of one rank, shared by its programs.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "hostweave/call_log.h"
#include "hostweave/channel.h"
#include "hostweave/hidden.h"

namespace hw {

// Pools of streams that the runtime treats specially. The compiler gives the pools these names.
constexpr char kLoopStreams[] = "loop", kCommStreams[] = "comm", kPeerCopies[] = "peer_copies";
constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // cuBLASLt workspace per stream

// A stream, and the cuBLASLt workspace for matmuls on the stream.
struct Stream {
  cudaStream_t handle = nullptr;
  void* workspace = nullptr;
  const char* name = nullptr;  // name of the pool of the stream
  int index = 0;

  // The conversion also adds the stream to the call log.
  operator cudaStream_t() const {
    if (CallLog* const log = CallLog::current()) log->on(handle, name, index);
    return handle;
  }
};

// A library handle with its destructor.
struct Handle {
  void* handle = nullptr;
  void (*destroy)(void* handle) = nullptr;
};

// One rank: its index in the world, device, library handles, streams and channels. Only one thread at a time may use a rank, with
// `device` current. A rank must outlive its programs.
class Rank {
 public:
  Rank(int device, int64_t index, int64_t size);
  ~Rank();

  int device() const { return device_; }
  int64_t index() const { return index_; }  // index in the world: row-major in the coordinates of the mesh
  int64_t size() const { return size_; }
  // Returns *this. Throws ExecutionError if the world has another size.
  Rank& expect_world(int64_t size);

  // The key of a channel has three parts: the mesh ("mesh(dp=2, tp=4)"), the axes of the process group ("dp, tp"), and the
  // transport.
  void add_channel(const char* mesh, const char* axes, const Channel& channel, Transport transport = Transport::two_sided);
  bool has_channel(const char* mesh, const char* axes, Transport transport = Transport::two_sided) const;
  // Throws ExecutionError if there is no such channel, or if its process group has another size.
  const Channel& channel(const char* mesh, const char* axes, int64_t size, Transport transport = Transport::two_sided) const;

  // Registers memory that peers can access until `unshare`. Arguments of calls may be in this memory.
  void share(SharedMemory memory);
  void unshare(const char* data);

  cublasLtHandle_t blas();  // made on first use
  // Handle of a library that only some programs use. Its pointer is null until a program sets it.
  Handle& handle(const char* library);
  // The i-th stream of this name, made on first use and shared by all programs. Streams of kCommStreams and
  // kPeerCopies only communicate, and have the highest priority.
  Stream stream(const char* name, int i);

  // True if new matmul plans measure algorithms and select the fastest.
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
