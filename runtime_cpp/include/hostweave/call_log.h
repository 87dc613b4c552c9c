// Log of a rank's calls, for reports of hangs. The log tells which lines of program.cpp the rank has enqueued, and which lines
// have finished. HW_CHECK adds its line to the log. The streams, events and channels in the line add themselves first. A
// milestone (milestones.h) follows each op or NCCL group that may wait for another call or rank. Captures may omit the
// milestones. The log infers the finished lines from the milestones and from the order of streams and events.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "hostweave/hidden.h"

namespace hw {

class Channel;
struct LoggedOps;   // ops of a call, or of a graph
struct Standstill;  // standstill.h

// RAII: lets this thread query events and free memory while it or another thread captures, without invalidating that capture.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CallLog {
 public:
  CallLog();

  // The log to which the current thread adds lines, or null.
  static CallLog* current() { return current_; }

  // --- for the one thread that makes calls

  // Begins a call. All work that is enqueued until `end_call` belongs to the call.
  void begin_call();
  // Ends the call. All work of the call must be on `caller`, or on streams that `caller` waits for. Throws ExecutionError if CUDA
  // fails.
  void end_call(cudaStream_t caller);
  // Declares that the call launches a graph of these ops.
  void launches(LoggedOps* ops);

  // RAII: the current thread adds lines to the current call. Outside of calls, the thread adds lines to the ops of a capture.
  // With `is_marked`, the capture has milestones; `prepare_capture` must have returned true.
  class Adding {
   public:
    Adding(CallLog& log, cudaStream_t caller, bool is_marked);
    ~Adding();
    Adding(Adding&&) = delete;
  };
  // Prepares captures. Returns true if they can have milestones (see Milestones::prepare_capture). Throws ExecutionError if CUDA
  // fails.
  bool prepare_capture(bool wanted);
  // For captures by the application: add milestones before and after the captured work if the capture is marked. Both functions
  // throw ExecutionError if CUDA fails.
  void begins_launch();
  void ends_launch();
  // Returns the ops of the last capture. The destructor of Graph calls `forget`.
  LoggedOps* captured();
  void forget(LoggedOps* ops);

  // --- for HW_CHECK, and for the streams, events and channels that a line uses

  void on(cudaStream_t stream, const char* name, int index);
  void over(const Channel& channel);
  void with_peer(int peer);  // for a send to the peer, or a recv from the peer
  void records(cudaEvent_t event, cudaStream_t stream);
  void awaits(cudaEvent_t event, cudaStream_t stream);
  void gives_signal(const Channel& channel, int64_t peer, int number, cudaStream_t stream);
  void awaits_signal(const Channel& channel, int64_t peer, int number, cudaStream_t stream);
  void line(const char* call, const char* file, int number);

  // --- for any thread

  struct State {
    int64_t made;            // number of calls, plus begun graph launches by the application
    int64_t done;            // number of these calls and launches that are done
    double waiting_seconds;  // since the first unfinished call began; Progress::look also considers graph launches
  };
  State state();
  // Reads the state of the streams in an unfinished graph launch by the application or, if there is none, in the first unfinished
  // call.
  void look(Standstill& standstill);

 private:
  struct Calls;
  void end_group();
  static constinit thread_local CallLog* current_;
  Hidden<Calls> calls_;
};

}  // namespace hw
