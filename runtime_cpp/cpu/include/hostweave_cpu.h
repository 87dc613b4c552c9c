// Controls of the CPU device. The other headers declare the CUDA, NCCL and cuBLASLt calls that the device implements. Unless
// `processes` is set, a rank is a host thread with a separate device (cudaSetDevice(rank)); "rank 2" in a report is device 2.
// Functions that return int return 0 on success, except hw_cpu_failed. After a failure, hw_cpu_last_report() has the error.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cuda_runtime_api.h"
#include "library_types.h"
#include "nccl.h"

extern "C" {

enum hw_cpu_mode {
  HW_CPU_PARALLEL = 0,  // a pool of threads runs ready ops; fast
  HW_CPU_SEEDED = 1     // one step at a time, chosen by the seed; deterministic
};

enum hw_cpu_picker {
  HW_CPU_MIXED = 0,    // the seed chooses one of the pickers below, usually PCT
  HW_CPU_UNIFORM = 1,  // chooses uniformly among the threads and streams that can run
  HW_CPU_PCT = 2,      // random priorities, which may change at random moments (Burckhardt et al., 2010)
  HW_CPU_HOSTS = 3     // rank threads before streams, so that every op runs as late as possible
};

typedef struct hw_cpu_config {
  int mode = HW_CPU_PARALLEL;    // hw_cpu_mode
  uint64_t seed = 0;             // used in seeded mode
  int picker = HW_CPU_MIXED;     // hw_cpu_picker, used in seeded mode
  int devices = 8;               // result of cudaGetDeviceCount
  int ranks = 0;                 // rank threads that will attach; 0 means `devices`
  int processes = 0;             // 1: each rank is a process of this host with one device; parallel mode only
  int workers = 0;               // worker threads in parallel mode; 0 means one per core
  int ordered_launches = -1;     // ops of one communicator run in issue order across streams: 1 yes, 0 no, -1 by the seed (yes in
                                 // parallel mode). Processes always use 1; 0 finds programs that depend on the order.
  int buffered_sends = -1;       // a send may end before its recv begins: 1 yes, 0 no, -1 by the seed (no in parallel mode)
  int check_dependencies = -1;   // report unordered conflicting accesses: 1 yes, 0 no, -1 in seeded mode only
  double timeout_seconds = 120;  // a wait of a host thread reports a deadlock after this time without progress
} hw_cpu_config;

// Resets the device to this configuration: clears failures, schedules, histories, and the counts of ops and steps. Streams,
// events, communicators and memory stay valid. Fails if a value is invalid, or while a rank thread is attached or work is queued.
int hw_cpu_configure(const hw_cpu_config* config);

// A rank thread attaches to device `rank` before its first call, and detaches after its last. In seeded mode, hw_cpu_attach
// returns when all `ranks` threads have attached and this thread has its turn. Afterwards, the thread runs only in its turn. The
// thread must not wait for another rank by means that the device cannot see, such as a mutex, std::barrier or join. Use
// hw_cpu_barrier or hw_cpu_pause instead. In parallel mode, a deadlock of attached threads is reported at once; other deadlocks
// are reported after the timeout. A thread may use the device without attaching; in seeded mode, only while no thread is
// attached. After a failure, hw_cpu_detach waits for ops that still run.
int hw_cpu_attach(int rank);
int hw_cpu_detach(void);
// Barrier of `participants` threads.
int hw_cpu_barrier(int participants);
// Lets other threads and streams run. Call hw_cpu_pause in a loop that polls a condition unknown to the device.
int hw_cpu_pause(void);
// Reports a failure outside the device, which stops all ranks: until hw_cpu_configure, calls that wait, enqueue or allocate fail.
void hw_cpu_abort(const char* reason);

// Fault injection: makes the nth following call of the function `call` fail, on any thread. `call` is "cudaMalloc" (which
// includes ncclMemAlloc), "cudaMallocHost", "cudaStreamCreate" or "cudaEventCreate" (the functions with flags),
// "ncclCommInitRank" or "cublasLtCreate". If nth is 0, no call fails.
void hw_cpu_fail_call(const char* call, int nth);

// Sets the source position of this thread's next calls, for reports. HW_CHECK calls this function before each call.
// `call` is the source text of the call. The strings are copied.
void hw_cpu_location(const char* file, int line, const char* call);

// Report of the failure that stopped all ranks. If there was no such failure, the last error of this thread, or "". The string is
// valid until this thread calls the function again.
const char* hw_cpu_last_report(void);
// Returns 1 after a failure that stops all ranks (such as a deadlock, mismatch or abort), until hw_cpu_configure.
int hw_cpu_failed(void);

typedef struct hw_cpu_counters {
  uint64_t ops;         // ops finished since hw_cpu_configure
  uint64_t steps;       // number of choices in seeded mode
  uint64_t schedule;    // hash of those choices
  uint64_t live_bytes;  // allocated by cudaMalloc or ncclMemAlloc and not freed, on all devices
  uint64_t live_streams;
  uint64_t live_events;
  uint64_t live_communicators;
  uint64_t allocations;   // total allocations by cudaMalloc and ncclMemAlloc
  uint64_t copied_bytes;  // total bytes of calls with cudaMemcpyDeviceToDevice
} hw_cpu_counters;
void hw_cpu_get_counters(hw_cpu_counters* counters);
// Number of existing cublasLtMatmul descriptors.
uint64_t hw_cpu_live_matmuls(void);
// For tests of tuning. After hw_cpu_set_algorithms, the heuristic returns at most `count` algorithms (1 to 8). All algorithms
// compute the same result; later algorithms are faster. hw_cpu_runs_of_algorithm returns how often an algorithm has run since the
// last hw_cpu_set_algorithms.
void hw_cpu_set_algorithms(int count);
uint64_t hw_cpu_runs_of_algorithm(int algorithm);

// Memory that a kernel accesses: `rows` pieces of `bytes` bytes with stride `pitch` bytes (rows = 1 for a plain range).
// A kernel that reads and writes the same bytes declares both.
typedef struct hw_cpu_range {
  const void* pointer;
  size_t bytes;
  size_t rows;
  size_t pitch;
  int write;
} hw_cpu_range;

// Enqueues a kernel. The device calls `run` once, with a copy of the closure; `run` executes the whole grid. `name` and the
// ranges are copied. In seeded mode, the device fills write-only ranges with 0xff bytes when the kernel begins. `subject` is the
// index of the argument that is named in reports.
cudaError_t hw_cpu_launch(const char* name, cudaStream_t stream, void (*run)(void* closure), const void* closure,
                          size_t closure_bytes, const hw_cpu_range* ranges, int range_count, int subject = 0);

// Increments `word` when the last op on the stream at the time of the call is done. If this op is captured, each launch of the
// graph increments `word`.
cudaError_t hw_cpu_milestone(cudaStream_t stream, uint64_t* word);

// Binary signals of the `peer` transport. Both calls enqueue an op, also in graphs. The op of hw_cpu_set_signal waits until the
// peer has consumed the previous signal. The op of hw_cpu_take_signal waits for a signal and consumes the signal.
ncclResult_t hw_cpu_set_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream);
ncclResult_t hw_cpu_take_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream);

// For kernels: calls run(closure, i) for i = 0, ..., count - 1. In parallel mode, idle workers may make some of the calls.
void hw_cpu_split(size_t count, void (*run)(void* closure, size_t i), void* closure);

// For kernels: row-major c[m, n] = a[m, k] b[k, n] + beta c on the calling thread. b may be transposed.
void hw_cpu_multiply(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, bool b_transposed, float* c,
                     int64_t c_pitch, int64_t m, int64_t n, int64_t k, float beta);

// For kernels: row-major c[m, n] = a[m, k] b[k, n]. Sums are f64 for f64 operands, and f32 for f32, f16 and bf16. A
// transposed operand is column-major. Idle workers help.
void hw_cpu_product(cudaDataType_t operands, const void* a, int64_t a_pitch, bool a_transposed, const void* b, int64_t b_pitch,
                    bool b_transposed, cudaDataType_t result, void* c, int64_t c_pitch, int64_t m, int64_t n, int64_t k);

}  // extern "C"
