// Controls of the CPU device, beyond the CUDA, NCCL and cuBLASLt calls that it implements.
//
// A rank is a host thread with a device of its own (cudaSetDevice(rank)); in reports "rank 2" is device 2.
// Every function that returns int returns 0 on success; otherwise hw_cpu_last_report() says what went wrong.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cuda_runtime_api.h"
#include "nccl.h"

extern "C" {

enum hw_cpu_mode {
  HW_CPU_PARALLEL = 0,  // a pool of workers runs whatever is ready: the fast way
  HW_CPU_SEEDED = 1     // one thing at a time, chosen by the seed: the same seed gives the same schedule
};

enum hw_cpu_picker {
  HW_CPU_MIXED = 0,    // one of the others, by the seed: mostly PCT
  HW_CPU_UNIFORM = 1,  // any candidate with equal chance
  HW_CPU_PCT = 2,      // random priorities that change at a few random moments (Burckhardt et al., 2010)
  HW_CPU_HOSTS = 3     // rank threads before streams, so that every op runs as late as it can
};

typedef struct hw_cpu_config {
  int mode = HW_CPU_PARALLEL;    // hw_cpu_mode
  uint64_t seed = 0;             // of the seeded mode
  int picker = HW_CPU_MIXED;     // hw_cpu_picker, of the seeded mode
  int devices = 8;               // what cudaGetDeviceCount answers
  int ranks = 0;                 // rank threads that will attach; 0 means `devices`
  int processes = 0;             // 1: each rank is a process of this host, with one device; in parallel mode alone
  int workers = 0;               // of the parallel mode; 0 means one per core
  int ordered_launches = -1;     // ops of one communicator run in issue order across streams: 1 yes, 0 no, -1 by the seed
                                 // (yes in parallel mode). NCCL does order them; "no" finds what relies on that.
  int buffered_sends = -1;       // a send ends before its recv begins: 1 yes, 0 no, -1 by the seed (no in parallel mode)
  int check_dependencies = -1;   // report conflicting accesses that nothing orders: 1 yes, 0 no, -1 in seeded mode only
  double timeout_seconds = 120;  // no progress for so long, with a host thread waiting, is reported as a deadlock
} hw_cpu_config;

// Starts afresh with this configuration: forgets failures, schedules, counters and histories. Streams, events,
// communicators and memory stay valid. Fails while a rank thread is attached or work is queued.
int hw_cpu_configure(const hw_cpu_config* config);

// A rank thread announces itself, on device `rank`, before its first call, and leaves after its last. In seeded mode
// attach returns when all `ranks` threads have come and this one has its turn; from then on it runs only in its turn,
// so it must not wait for another rank by means that the device cannot see (a mutex, std::barrier, join): use
// hw_cpu_barrier or hw_cpu_pause. In parallel mode attaching lets a deadlock be reported at once instead of after the
// timeout. Threads that do not attach may use the device too (in seeded mode only while nobody is attached).
int hw_cpu_attach(int rank);
int hw_cpu_detach(void);
// Waits until `participants` threads are here.
int hw_cpu_barrier(int participants);
// Lets others go on; for loops that poll something the device does not know.
int hw_cpu_pause(void);
// After a failure of one rank outside the device: every blocked or later call of every rank fails, until hw_cpu_configure.
void hw_cpu_abort(const char* reason);

// Has the nth of the coming calls of cudaMalloc, cudaStreamCreate, cudaEventCreate (both with flags), ncclCommInitRank or
// cublasLtCreate fail, on whatever thread, for tests of what then becomes of all the rest. 0 takes it back.
void hw_cpu_fail_call(const char* call, int nth);

// Says where the next calls of this thread come from, for reports: the check macro sets it before each call.
// `call` is the source text of the call. The strings are copied.
void hw_cpu_place(const char* file, int line, const char* call);

// What went wrong: the report of the failure that stopped all ranks, else this thread's last error, else "".
// Valid until this thread's next call of it.
const char* hw_cpu_last_report(void);
// 1 after a failure that stops all ranks (deadlock, mismatch, missing dependency, abort), until hw_cpu_configure.
int hw_cpu_failed(void);

typedef struct hw_cpu_counters {
  uint64_t ops;         // finished since hw_cpu_configure
  uint64_t steps;       // choices that the seeded mode made
  uint64_t schedule;    // a hash of those choices
  uint64_t live_bytes;  // cudaMalloc'ed and not yet freed, all devices
  uint64_t live_streams;
  uint64_t live_events;
  uint64_t live_communicators;
  uint64_t allocations;   // calls of cudaMalloc, ever
  uint64_t copied_bytes;  // between buffers of devices, ever
} hw_cpu_counters;
void hw_cpu_get_counters(hw_cpu_counters* counters);
// How many descriptions of cublasLtMatmul there are.
uint64_t hw_cpu_live_matmuls(void);
// So many algorithms cublasLtMatmul is said to have, where it has one: all compute the same, the later ones sooner, and the last
// is the fastest by far. How often the given one has run since.
void hw_cpu_set_algorithms(int count);
uint64_t hw_cpu_runs_of_algorithm(int algorithm);

// Memory that a kernel touches: `rows` pieces of `bytes` bytes, `pitch` bytes apart (rows 1 for a plain range).
// A kernel that reads and writes the same bytes declares both.
typedef struct hw_cpu_range {
  const void* pointer;
  size_t bytes;
  size_t rows;
  size_t pitch;
  int write;
} hw_cpu_range;

// Enqueues a kernel: `run` is called once with a copy of the closure and does the whole grid. `name` and the ranges are
// copied. The seeded mode overwrites what is only written with NaN when the kernel begins. Reports name an argument of the call
// that enqueues it, the `subject`.
cudaError_t hw_cpu_launch(const char* name, cudaStream_t stream, void (*run)(void* closure), const void* closure,
                          size_t closure_bytes, const hw_cpu_range* ranges, int range_count, int subject = 0);

// Signals of which a rank gives the next one only when its peer has taken the one before, in calls and in graphs alike.
ncclResult_t hw_cpu_set_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream);
ncclResult_t hw_cpu_take_signal(ncclComm_t comm, int peer, int number, cudaStream_t stream);

// For kernels: calls run(closure, i) for each i below count, on idle workers, too.
void hw_cpu_split(size_t count, void (*run)(void* closure, size_t i), void* closure);

// For kernels: row-major c[m, n] = a[m, k] b[k, n] + beta c, on the calling thread; b may lie transposed.
void hw_cpu_multiply(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, bool b_transposed, float* c,
                     int64_t c_pitch, int64_t m, int64_t n, int64_t k, float beta);

}  // extern "C"
