// Minimal runtime for program.cpp, with faults for tests.
#pragma once
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#if __has_include(<hostweave_cpu.h>)
#include <hostweave_cpu.h>
#define HW_LOCATION(text) hw_cpu_location(__FILE__, __LINE__, text)
#else
#define HW_LOCATION(text) ((void)0)
#endif

namespace hw {

// Faults. Stream `fork` does not wait for the caller, and the caller does not wait for stream `join`. With
// `matmul_on_next_stream`, each matmul is on the next stream.
struct Sabotage {
  int fork = -1;
  int join = -1;
  bool matmul_on_next_stream = false;
};
inline Sabotage sabotage;
inline thread_local std::map<cudaStream_t, cudaStream_t> next_stream;

using bf16 = __nv_bfloat16;

[[noreturn]] inline void fail(const char* what, const char* call, const char* file, int line) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " + what);
}
inline void check(cudaError_t e, const char* call, const char* file, int line) {
  if (e != cudaSuccess) fail(cudaGetErrorString(e), call, file, line);
}
inline void check(ncclResult_t e, const char* call, const char* file, int line) {
  if (e != ncclSuccess && e != ncclInProgress) fail(ncclGetErrorString(e), call, file, line);
}
inline void check(cublasStatus_t e, const char* call, const char* file, int line) {
  if (e != CUBLAS_STATUS_SUCCESS) fail(cublasLtGetStatusString(e), call, file, line);
}
#define HW_CHECK(call) (HW_LOCATION(#call), ::hw::check((call), #call, __FILE__, __LINE__))

// Closes the thread's NCCL group if an exception leaves the scope.
class CloseGroupOnError {
 public:
  ~CloseGroupOnError() {
    if (std::uncaught_exceptions() > exceptions_) ncclGroupEnd();
  }

 private:
  int exceptions_ = std::uncaught_exceptions();
};

class Tensor {  // a borrowed, contiguous device array
 public:
  Tensor(void* data, cudaDataType_t dtype, std::initializer_list<int64_t> shape) : data_(data), dtype_(dtype), shape_(shape) {}
  int64_t dim(size_t i) const { return shape_.at(i); }
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  void expect(const char* name, cudaDataType_t dtype, std::initializer_list<int64_t> shape) const {
    if (dtype != dtype_ || !std::equal(shape_.begin(), shape_.end(), shape.begin(), shape.end()))
      throw std::invalid_argument(std::string(name) + ": unexpected dtype or shape");
  }

 private:
  void* data_;
  cudaDataType_t dtype_;
  std::vector<int64_t> shape_;
};

class Channel {
 public:
  Channel(ncclComm_t comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}
  ncclComm_t comm() const { return comm_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  ncclComm_t comm_;
  int rank_, size_;
};

class Rank {  // resources of one rank: its channel, a cuBLASLt handle, and a GEMM workspace for each stream
 public:
  Rank(ncclComm_t comm, int rank, int size) : x_(comm, rank, size) { HW_CHECK(cublasLtCreate(&blas_)); }
  ~Rank() {
    cublasLtDestroy(blas_);
    for (auto w : workspaces_) cudaFree(w);
  }
  Rank(const Rank&) = delete;
  Channel& channel(const char* axes, int size) {
    if (x_.size() != size) throw std::invalid_argument(std::string("channel ") + axes + ": program and world differ in size");
    return x_;
  }
  cublasLtHandle_t blas() const { return blas_; }
  static constexpr size_t workspace_size() { return size_t{32} << 20; }
  void* workspace(size_t stream) {
    while (workspaces_.size() <= stream) HW_CHECK(cudaMalloc(&workspaces_.emplace_back(), workspace_size()));
    return workspaces_[stream];
  }

 private:
  Channel x_;
  cublasLtHandle_t blas_;
  std::vector<void*> workspaces_;
};

class Streams {  // a ring of streams that fork from the caller's stream and join it; events are made once
 public:
  Streams(Rank& rank, int n) : rank_(rank), streams_(n), events_(n) {
    for (auto& s : streams_) HW_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (auto& e : events_) HW_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    HW_CHECK(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming));
    rank.workspace(n - 1);
    for (int i = 0; i < n; ++i) next_stream[streams_[i]] = streams_[(i + 1) % n];
  }
  ~Streams() {
    for (auto s : streams_) cudaStreamDestroy(s);
    for (auto e : events_) cudaEventDestroy(e);
    cudaEventDestroy(begin_);
  }
  Streams(const Streams&) = delete;
  cudaStream_t operator[](int64_t i) const { return streams_[i % streams_.size()]; }
  void* workspace(int64_t i) const { return rank_.workspace(i % streams_.size()); }
  void fork(cudaStream_t caller) {
    HW_CHECK(cudaEventRecord(begin_, caller));
    for (size_t i = 0; i < streams_.size(); ++i)
      if (static_cast<int>(i) != sabotage.fork) HW_CHECK(cudaStreamWaitEvent(streams_[i], begin_, 0));
  }
  void join(cudaStream_t caller) {
    for (size_t i = 0; i < streams_.size(); ++i) {
      HW_CHECK(cudaEventRecord(events_[i], streams_[i]));
      if (static_cast<int>(i) != sabotage.join) HW_CHECK(cudaStreamWaitEvent(caller, events_[i], 0));
    }
  }

 private:
  Rank& rank_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  cudaEvent_t begin_;
};

class Arena {  // memory that grows if a larger shape is prepared, but never during a call
 public:
  ~Arena() { cudaFree(base_); }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    HW_CHECK(cudaFree(base_));
    HW_CHECK(cudaMalloc(&base_, size_ = bytes));
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset);
  }

 private:
  void* base_ = nullptr;
  size_t size_ = 0;
};

class Matmul {  // row-major C[m, n] = A[m, k] B[k, n], which cuBLASLt sees as column-major C' = B' A'; one plan per shape
 public:
  Matmul(Rank& rank, cudaDataType_t dtype, cublasComputeType_t compute) : rank_(rank), dtype_(dtype) {
    HW_CHECK(cublasLtMatmulDescCreate(&desc_, compute, CUDA_R_32F));
  }
  ~Matmul() {
    for (auto& [shape, p] : plans_)
      for (auto layout : {p.a, p.b, p.c}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(desc_);
  }
  Matmul(const Matmul&) = delete;

  void plan(int64_t m, int64_t k, int64_t n) {
    const auto [it, fresh] = plans_.try_emplace({m, k, n});
    current_ = &it->second;
    if (!fresh) return;
    Plan& p = it->second;
    HW_CHECK(cublasLtMatrixLayoutCreate(&p.a, dtype_, k, m, k));
    HW_CHECK(cublasLtMatrixLayoutCreate(&p.b, dtype_, n, k, n));
    HW_CHECK(cublasLtMatrixLayoutCreate(&p.c, dtype_, n, m, n));
    cublasLtMatmulPreference_t preference;
    HW_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const size_t bytes = Rank::workspace_size();
    HW_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    HW_CHECK(cublasLtMatmulAlgoGetHeuristic(rank_.blas(), desc_, p.b, p.a, p.c, p.c, preference, 1, &best, &found));
    cublasLtMatmulPreferenceDestroy(preference);
    if (!found) throw std::runtime_error("cublasLt has no algorithm for this matmul");
    p.algo = best.algo;
  }

  cublasStatus_t cublasLtMatmul(const void* a, const void* b, void* c, void* workspace, cudaStream_t stream) const {
    const float one = 1, zero = 0;
    const Plan& p = *current_;
    if (sabotage.matmul_on_next_stream) stream = next_stream.at(stream);
    return ::cublasLtMatmul(rank_.blas(), desc_, &one, b, p.b, a, p.a, &zero, c, p.c, c, p.c, &p.algo, workspace,
                            Rank::workspace_size(), stream);
  }

 private:
  struct Plan {
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulAlgo_t algo{};
  };
  Rank& rank_;
  cudaDataType_t dtype_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  std::map<std::array<int64_t, 3>, Plan> plans_;
  const Plan* current_ = nullptr;
};

}  // namespace hw
