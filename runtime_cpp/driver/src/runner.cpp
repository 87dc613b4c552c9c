#include "hostweave/runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/device_memory.h"
#include "hostweave/errors.h"
#include "hostweave/streams.h"
#include "world_target.h"

namespace hw {
namespace {

// An array of no elements has an address, too.
size_t at_least_one(size_t bytes) { return std::max<size_t>(bytes, 1); }

// Has copies from that GPU go directly, not through the host's memory, where the machine can do that.
void see(int device, int peer) {
  int can = 0;
  HW_CHECK(cudaDeviceCanAccessPeer(&can, device, peer));
  if (!can) return;
  const cudaError_t cudaDeviceEnablePeerAccess = ::cudaDeviceEnablePeerAccess(peer, 0);
  if (cudaDeviceEnablePeerAccess == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // an earlier call, NCCL or the host application has done it
  } else {
    HW_CHECK(cudaDeviceEnablePeerAccess);
  }
}

}  // namespace

// The program on one rank, the stream it is called on, and the device memory of its arguments.
class Runner::Seat {
 public:
  Seat(Rank& rank, const ProgramTable& program)
      : device_(rank.device()),
        program_(program),
        inputs_(program.calls.inputs.in<std::vector<Tensor>>()),
        outputs_(program.calls.outputs.in<std::vector<Tensor>>()) {
    HW_CHECK(cudaStreamCreateWithFlags(&caller_, cudaStreamNonBlocking));
    try {
      instance_ = program.calls.create(rank);
    } catch (...) {
      cudaStreamDestroy(caller_);
      throw;
    }
  }
  ~Seat() {
    program_.calls.destroy(instance_);
    cudaStreamDestroy(caller_);
  }
  Seat(Seat&&) = delete;

  cudaStream_t caller() const { return caller_; }

  // Fetches the inputs that lie on GPUs of other ranks into memory of their own, and has the calls use that.
  //
  // A copy between two GPUs may take a place in queues of both, with the copies of other ranks from the same GPU. Were it
  // enqueued between calls, a rank's copy for a later call, which waits for its own earlier calls, could stand there before
  // another rank's copy for an earlier one, without which those do not end: their collectives need every rank. Here no
  // collective is under way: all ranks have fetched before any of them is called, and copies wait for nothing but copies.
  // Afterwards each GPU is used by its own rank alone and but for collectives waits for no other one. All ranks enqueue the
  // collectives in one order, and each what they need before them, so a GPU that took everything from one queue
  // (CUDA_DEVICE_MAX_CONNECTIONS=1) would come through, too.
  void fetch(std::vector<Call>& calls, int rank) {
    fetched_.resize(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      std::vector<Array>& inputs = calls[i].inputs[rank];
      fetched_[i].resize(inputs.size());
      for (size_t k = 0; k < inputs.size(); ++k) {
        Array& input = inputs[k];
        if (input.device < 0 || input.device == device_) continue;
        see(device_, input.device);
        void* const here = fetched_[i][k].reserve(at_least_one(input.bytes));
        copy(here, input.data, input, cudaMemcpyDefault);
        input.data = here;
        input.device = device_;
      }
    }
  }

  // Throws ArgumentError for arguments that the program cannot take.
  void check(const std::vector<Call>& calls, int rank) {
    bind(calls.front(), rank);
    std::vector<Shape> shapes(outputs_.tensors.size());
    program_.calls.output_shapes(instance_, inputs_.tensors.data(), shapes.data());
  }

  void prepare(const std::vector<Call>& calls, int rank) {
    bind(calls.front(), rank);
    program_.calls.prepare(instance_, inputs_.tensors.data());
    for (const Call& call : calls) bind(call, rank);  // takes what staging memory they need, before any rank runs
  }

  // The arguments of this call: its own arrays where they can be used in place.
  void bind(const Call& call, int rank) {
    place(inputs_, call.inputs[rank]);
    place(outputs_, call.outputs[rank]);
  }

  void poison() {
    size_t bytes = 0;
    for (size_t part = 0; void* const memory = program_.calls.arena(instance_, part, &bytes); ++part) {
      HW_CHECK(cudaMemsetAsync(memory, 0xff, bytes, caller_));
    }
    for (size_t i = 0; i < outputs_.tensors.size(); ++i) {
      HW_CHECK(cudaMemsetAsync(outputs_.tensors[i].data, 0xff, outputs_.bytes[i], caller_));
    }
  }

  void copy_in(const Call& call, int rank) {
    for (size_t i = 0; i < inputs_.tensors.size(); ++i) {
      copy(inputs_.tensors[i].data, call.inputs[rank][i].data, call.inputs[rank][i], cudaMemcpyHostToDevice);
    }
  }

  void run() { program_.calls.run(instance_, inputs_.tensors.data(), outputs_.tensors.data(), caller_); }

  void copy_out(const Call& call, int rank) {
    for (size_t i = 0; i < outputs_.tensors.size(); ++i) {
      copy(call.outputs[rank][i].data, outputs_.tensors[i].data, call.outputs[rank][i], cudaMemcpyDeviceToHost);
    }
  }

 private:
  struct Arguments {
    explicit Arguments(std::vector<Tensor> of) : tensors(std::move(of)), staging(tensors.size()), bytes(tensors.size()) {}

    std::vector<Tensor> tensors;
    std::vector<DeviceMemory> staging;
    std::vector<size_t> bytes;
  };

  // An array on this device is used where it is.
  bool in_place(const Array& array) const { return array.device == device_ && reinterpret_cast<uintptr_t>(array.data) % 16 == 0; }

  void place(Arguments& arguments, const std::vector<Array>& arrays) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      const Array& array = arrays[i];
      void* const data = in_place(array) ? array.data : arguments.staging[i].reserve(at_least_one(array.bytes));
      arguments.tensors[i] = {data, arguments.tensors[i].dtype, array.shape, device_, array.global_shape};
      arguments.bytes[i] = array.bytes;
    }
  }

  void copy(void* dst, const void* src, const Array& array, cudaMemcpyKind host_kind) {
    if (dst == src || array.bytes == 0) return;
    HW_CHECK(cudaMemcpyAsync(dst, src, array.bytes, array.device < 0 ? host_kind : cudaMemcpyDefault, caller_));
  }

  int device_;
  const ProgramTable& program_;
  void* instance_ = nullptr;
  cudaStream_t caller_ = nullptr;
  Arguments inputs_, outputs_;
  std::vector<std::vector<DeviceMemory>> fetched_;  // [call][input]
};

// How far the ranks have come with some calls: they note it, and the thread that waits for them looks.
class Runner::Watch {
 public:
  // The last `in_flight` calls may still be under way when a rank has enqueued them all.
  Watch(const Schedule& schedule, size_t ranks, size_t calls, size_t in_flight)
      : calls_(calls),
        seconds_(target::patience(schedule) * static_cast<double>(in_flight)),
        enqueued_(ranks),
        finished_(ranks) {}

  void enqueued(int rank) { ++enqueued_[rank]; }
  void finished(int rank) { finished_[rank] = true; }

  // Gives up as the caller does, and with a report where nothing has moved for too long.
  GiveUp with(const GiveUp& give_up) {
    return [this, &give_up] {
      const size_t moves = std::accumulate(enqueued_.begin(), enqueued_.end(), size_t{0}) +
                           std::accumulate(finished_.begin(), finished_.end(), size_t{0});
      const auto now = Clock::now();
      if (std::exchange(moves_, moves) != moves) since_ = now;
      if (std::chrono::duration<double>(now - since_).count() > seconds_) throw ExecutionError(report());
      return give_up && give_up();
    };
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string report() const {
    std::string text = "no rank has come further for " + std::to_string(std::lround(seconds_)) + " seconds";
    for (size_t rank = 0; rank < enqueued_.size(); ++rank) {
      text += "\n  rank " + std::to_string(rank) + ": " + std::to_string(enqueued_[rank]) + " of " + std::to_string(calls_) +
              " calls enqueued" + (finished_[rank] ? ", all done" : ", not done");
    }
    return text;
  }

  size_t calls_;
  double seconds_;
  std::vector<std::atomic<size_t>> enqueued_;
  std::vector<std::atomic<bool>> finished_;
  size_t moves_ = 0;
  Clock::time_point since_ = Clock::now();
};

Runner::Runner(World& world, const ProgramTable& program, bool measures, const GiveUp& give_up)
    : world_(world), program_(program), measures_(measures), seats_(world.ranks()) {
  world_.connect({}, program, give_up);
  try {
    world_.each_alone({}, [&](Rank& rank) { seats_[rank.index()] = std::make_unique<Seat>(rank, program_); });
  } catch (...) {
    world_.each_alone({}, [&](Rank& rank) { seats_[rank.index()].reset(); });
    throw;
  }
}

Runner::~Runner() {
  try {
    world_.each_alone({}, [&](Rank& rank) { seats_[rank.index()].reset(); });
  } catch (const std::exception&) {
    // Nothing more can be done for a device that does not even free.
  }
}

void Runner::prepare(const Schedule& schedule, std::vector<Call>& calls, const GiveUp& give_up) {
  const auto check = [&](Rank& rank) {
    const int index = static_cast<int>(rank.index());
    seats_[index]->fetch(calls, index);
    seats_[index]->check(calls, index);
  };
  const auto prepare = [&](Rank& rank) {
    const int index = static_cast<int>(rank.index());
    rank.set_measures(measures_);
    seats_[index]->prepare(calls, index);
    world_.synchronize(seats_[index]->caller());
  };
  if (!program_.prepares_together) {
    world_.each_alone(schedule, [&](Rank& rank) { check(rank), prepare(rank); }, give_up);
  } else {  // first none may have a reason to fail
    world_.each_alone(schedule, check, give_up);
    world_.each(schedule, prepare, give_up);
  }
}

// Waits for the calls, then for what a wrong program may have left on streams that nobody joined.
void Runner::finish(Seat& seat) {
  world_.synchronize(seat.caller());
  HW_CHECK(cudaDeviceSynchronize());
}

void Runner::run(const Schedule& schedule, std::vector<Call> calls, bool poison, const GiveUp& give_up) {
  if (calls.empty()) return;
  const auto turn = acquire(turn_, give_up);
  prepare(schedule, calls, give_up);
  Watch watch(schedule, seats_.size(), calls.size(), calls.size());
  const auto work = [&](Rank& rank) {
    const int index = static_cast<int>(rank.index());
    Seat& seat = *seats_[index];
    for (const Call& call : calls) {
      seat.bind(call, index);
      if (poison) seat.poison();
      seat.copy_in(call, index);
      seat.run();
      seat.copy_out(call, index);
      watch.enqueued(index);
    }
    finish(seat);
    watch.finished(index);
  };
  world_.each(schedule, work, watch.with(give_up));
}

std::vector<std::vector<Timing>> Runner::measure(const Schedule& schedule, const Call& call, int warmups, int repetitions,
                                                 const GiveUp& give_up) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<Timing>> timings(seats_.size());
  const auto turn = acquire(turn_, give_up);
  std::vector<Call> calls{call};
  prepare(schedule, calls, give_up);
  Watch watch(schedule, seats_.size(), warmups + repetitions, 1);
  const target::Gate gate;
  const auto work = [&](Rank& rank) {
    const int index = static_cast<int>(rank.index());
    Seat& seat = *seats_[index];
    const target::Gate::Opening at_end(gate);  // nothing may be held where a rank fails
    const Event begin(cudaEventDefault), end(cudaEventDefault);
    seat.copy_in(calls.front(), index);
    for (int i = 0; i < warmups + repetitions; ++i) {
      world_.synchronize(seat.caller());
      world_.meet();
      const bool held = gate.holds() && i > 0;  // the first call may still wait for the device, as while a channel is set up
      if (held) gate.hold(seat.caller(), i);
      HW_CHECK(cudaEventRecord(begin, seat.caller()));
      const auto start = Clock::now();
      seat.run();
      const std::chrono::duration<double, std::micro> enqueue = Clock::now() - start;
      HW_CHECK(cudaEventRecord(end, seat.caller()));
      watch.enqueued(index);
      if (held) {
        world_.meet();
        if (index == 0) gate.open(i);
      }
      world_.synchronize(seat.caller());
      float total_ms = 0;
      HW_CHECK(cudaEventElapsedTime(&total_ms, begin, end));
      if (i >= warmups) timings[index].push_back({enqueue.count(), total_ms});
    }
    seat.copy_out(calls.front(), index);
    finish(seat);
    watch.finished(index);
  };
  world_.each(schedule, work, watch.with(give_up));
  return timings;
}

}  // namespace hw
