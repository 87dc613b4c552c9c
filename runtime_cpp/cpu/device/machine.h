// The simulated machine: devices, streams, host threads, and their scheduler.
//
// One mutex guards the state. Ops compute and transfer data without the mutex. When an op begins, the machine adds the op to the
// communications that the op takes part in. If check_dependencies is on, the machine also checks the accesses of the op for
// races. In seeded mode, the machine also fills the write-only outputs of the op with 0xff bytes. When an op ends, the machine
// wakes the streams that wait for the op. In parallel mode (workers.cpp), a thread pool runs ready ops. In seeded mode
// (turns.cpp), a seed chooses one step at a time among streams and host threads.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "history.h"
#include "hostweave_cpu.h"
#include "nccl.h"
#include "op.h"
#include "picker.h"

namespace hostweave::cpu {

using Lock = std::unique_lock<std::mutex>;

struct HostThread {
  int device = 0;
  bool attached = false;
  int rank = -1;
  bool inside = false;  // inside a device call
  bool waiting = false;
  std::function<bool()> ready;  // condition for which the thread waits
  std::string waits_for;        // description of that condition, for reports
  std::condition_variable wake;
  std::uint64_t priority = 0;
  Location location;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
};
HostThread& this_thread();

struct ProcessGroup;  // communicator.h

// --- allocations: device memory and pinned host memory

constexpr int kHost = -1;  // pseudo-device of host memory

struct Allocation {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;
  std::size_t mapped;  // bytes of the mapping; 0 for heap memory
  int file = -1;       // file that other processes can map, or -1
};

class Memory {
 public:
  // Allocates memory filled with 0xff bytes, which are NaN in every float type. With `shared`, other processes can map the
  // memory. Returns null on failure.
  void* allocate(std::size_t bytes, int device, bool shared);
  void release(void* pointer);
  const Allocation* find(std::uintptr_t address) const;  // allocation that contains this address, or null
  std::uint64_t live_bytes() const;                      // bytes allocated on all devices
  std::uint64_t made() const { return made_; }           // total number of allocations on devices

 private:
  std::map<std::uintptr_t, Allocation> allocations_;
  std::uint64_t made_ = 0;
};

class Machine {
 public:
  static Machine& get();

  // --- configuration and failure
  hw_cpu_config config;
  bool seeded() const { return config.mode == HW_CPU_SEEDED; }
  bool processes() const { return config.processes != 0; }
  bool checking() const { return checking_; }
  bool ordered_launches() const { return ordered_launches_; }
  bool buffered_sends() const { return buffered_sends_; }
  const char* configure(const hw_cpu_config& wanted);  // null, or an error message
  bool failed() const { return failed_; }
  const std::string& report() const { return report_; }
  void fail(std::string report);  // stops all ranks

  // --- streams and ops
  // Null if the stream does not exist or was destroyed.
  Stream* find_stream(cudaStream_t handle, int device = this_thread().device);
  Stream* create_stream(unsigned flags);
  void destroy_stream(Stream* stream);
  Stream& legacy_stream(int device);
  std::vector<OpPtr> tails(int device);  // the last op of every stream of a device
  // Merges the clocks of destroyed streams of the device into the clock of the calling host thread.
  void learn_retired(int device);
  void enqueue(Lock& lock, OpPtr op, Stream& stream);

  // --- host threads
  void attach(Lock& lock, int rank);
  void detach(Lock& lock);
  void enter(Lock& lock);
  void leave(Lock& lock);
  // Blocks until ready() returns true. Calls `ready` with the lock held. Returns false if the machine has failed.
  bool wait(Lock& lock, std::string waits_for, std::function<bool()> ready);
  void scheduling_point(Lock& lock);
  void pause(Lock& lock);
  void wait_for_running_work(Lock& lock);
  void progress();                                     // Wakes host threads that may be ready now.
  void learn(int device, const ClockSnapshot& clock);  // Merges a clock into the clock of the device's host thread.
  ClockSnapshot& host_clock(int device) { return host_side(device).clock; }
  std::size_t host_actor(int device) { return host_side(device).actor; }

  // --- work

  // Calls run(begin, end) for pieces of 0..count with at most `piece` elements. In parallel mode, idle workers may run some
  // of the pieces. Only running ops call `split`.
  using RunPiece = std::function<void(std::size_t begin, std::size_t end)>;
  void split(std::size_t count, std::size_t piece, const RunPiece& run);
  std::size_t idle_workers();
  // RAII: marks this worker as blocked on another process. Another worker replaces the blocked worker.
  struct Blocked {
    Blocked();
    ~Blocked();
  };

  // --- fault injection for tests
  void fail_call(std::string call, int nth) {
    faulty_call_ = std::move(call);
    calls_to_fault_ = nth;
  }
  bool fault(std::string_view call) { return calls_to_fault_ > 0 && call == faulty_call_ && --calls_to_fault_ == 0; }

  // --- reports
  const char* intern(std::string_view text) { return interned_.emplace(text).first->c_str(); }
  std::string deadlock_report();
  std::string no_progress_report();

  std::mutex mutex;
  Memory memory;
  History history;
  std::unordered_set<Event*> events;
  std::unordered_set<ncclComm*> communicators;
  std::vector<std::weak_ptr<ProcessGroup>> process_groups;
  std::map<std::uint64_t, std::shared_ptr<ProcessGroup>> process_groups_in_the_making;  // by number in the id
  std::set<int> files_in_the_making;                                                    // other processes still have to open them
  std::set<ncclWindow_t> windows;
  std::vector<std::shared_ptr<Capture>> captures;  // active ones
  std::optional<Picker> picker;
  struct Barrier {
    int arrived = 0;
    std::uint64_t generation = 0;
    Clock gathering;
    ClockSnapshot gathered;
  } barrier;  // state of hw_cpu_barrier

  // Returns the reason why an op on this device must not access these bytes, or nullopt.
  std::optional<std::string> illegal_access(const Ranges& ranges, int device, bool peers_allowed);
  std::set<std::pair<int, int>> peer_access;  // (device, peer)

  std::uint64_t copied_bytes = 0;  // total bytes of copies with cudaMemcpyDeviceToDevice

  std::uint64_t ops_done() const { return ops_done_; }
  std::size_t live_streams() const { return live_streams_; }
  std::string conflict_report(const History::Conflict& conflict, const OpName& name) const;

 private:
  struct HostSide {
    std::size_t actor;
    ClockSnapshot clock;
    Clock retired;  // clock of destroyed streams; synchronisation of the device merges this clock
  };
  struct Split {
    const RunPiece& run;
    std::size_t count, piece;
    std::size_t next = 0, running = 0;
    std::exception_ptr error = nullptr;  // thrown by a piece; the pieces after it do not run
  };

  Machine();
  std::size_t new_actor();
  HostSide& host_side(int device);
  Stream& new_stream(int device, int number);

  // machine.cpp
  void evaluate(Stream& stream);  // Adds the stream to the ready list if the first op of its queue can make a step.
  void advance(Lock& lock, Stream& stream);
  void begin(Stream& stream, Op& op);
  std::optional<OpName> over_another_channel(const Stream& stream, const Op& op, std::uint32_t epoch);
  void take_seats(Stream& stream, Op& op);
  void poison(const Op& op);
  void transfer(Lock& lock, Match& match);
  void end(Stream& stream, Op& op);
  void drop_queues();
  void retire(Stream& stream);

  // workers.cpp
  void start_workers();
  void stop_workers();
  void work();
  bool wait_parallel(Lock& lock, HostThread& me);
  void find_deadlock();
  void run_split(Lock& lock, Split& split);

  // turns.cpp
  bool wait_seeded(Lock& lock, HostThread& me);
  void step(Lock& lock, Stream* stream);
  void await_turn(Lock& lock, HostThread& me);
  // end of a timeout that begins now
  std::chrono::steady_clock::time_point deadline() const;
  int expected_ranks() const { return config.ranks > 0 ? config.ranks : config.devices; }
  void hand_turn(HostThread* thread);
  void pass_turn_on(Lock& lock);
  std::vector<Candidate> choices(HostThread* me);

  bool checking_ = false, ordered_launches_ = true, buffered_sends_ = false;
  std::atomic<bool> failed_ = false;  // waits for other processes read this flag without the lock
  std::string report_;
  std::uint64_t ops_done_ = 0, progress_ = 0;

  std::unordered_map<Stream*, std::unique_ptr<Stream>> streams_;
  std::vector<std::vector<Stream*>> by_device_;  // [device][i], legacy stream first
  std::size_t live_streams_ = 0;
  std::vector<std::size_t> free_actors_;
  // The last communication that has begun, by device, channel and actor (see Clock).
  std::unordered_map<int, std::map<std::pair<const ProcessGroup*, std::size_t>, History::Access>> posted_;
  std::size_t actors_ = 0;
  std::unordered_map<int, HostSide> hosts_;
  std::vector<Stream*> ready_;

  std::vector<HostThread*> attached_;  // sorted by rank
  std::vector<HostThread*> waiting_;   // waiting threads; in seeded mode, only unattached threads
  int arrived_ = 0;                    // rank threads that attached in this round
  bool round_started_ = false;         // set when all have attached; cleared when all have detached
  HostThread* turn_ = nullptr;
  std::condition_variable turn_free_;

  std::vector<std::jthread> workers_;
  std::condition_variable workers_wake_, workers_idle_;
  std::vector<Split*> splits_;
  std::size_t idle_workers_ = 0, blocked_workers_ = 0;
  std::size_t running_ = 0;  // threads that run work or a transfer without the lock
  bool stopping_ = false;

  std::string faulty_call_;
  int calls_to_fault_ = 0;

  std::unordered_set<std::string> interned_;
};

// memcpy that also uses idle workers.
void copy_bytes(void* to, const void* from, std::size_t bytes);

// One API call: holds the lock and, in seeded mode, the turn.
class Call {
 public:
  Call() : lock(Machine::get().mutex) { Machine::get().enter(lock); }
  ~Call() {
    if (!lock) lock.lock();
    Machine::get().leave(lock);
  }
  Call(const Call&) = delete;
  Lock lock;
};

// --- helpers of the CUDA calls

cudaError_t no_such_stream(cudaStream_t stream, const char* call);
// Enqueues an op that accesses memory of the stream's device, and of peers if allowed.
cudaError_t submit(Lock& lock, OpPtr op, cudaStream_t stream, bool peers_allowed = false);
// Blocks the host until these ops are done.
cudaError_t wait_for(Lock& lock, const std::vector<OpPtr>& ops, const std::string& what);
cudaError_t wait_for_device(Lock& lock, int device);
// Allocates memory for windows on this thread's device. If ranks are processes, other processes can map the memory.
cudaError_t allocate_for_windows(void** pointer, std::size_t bytes);

}  // namespace hostweave::cpu
