// Functions of hostweave_cpu.h for configuration, threads, failures, counters and kernels.
#include <algorithm>
#include <cstring>

#include "errors.h"
#include "machine.h"

using namespace hostweave::cpu;

extern "C" {

int hw_cpu_configure(const hw_cpu_config* config) {
  const Lock lock(Machine::get().mutex);
  const char* const wrong = Machine::get().configure(*config);
  if (wrong) error(cudaErrorInvalidValue, std::string("hw_cpu_configure: ") + wrong);
  return wrong != nullptr;
}

int hw_cpu_attach(int rank) {
  Machine& machine = Machine::get();
  Lock lock(machine.mutex);
  if (this_thread().attached) {
    error(cudaErrorInvalidValue, "hw_cpu_attach: this thread is already attached");
    return 1;
  }
  if (expect_below(machine.config.devices, "rank", rank, "hw_cpu_attach", cudaErrorInvalidDevice)) return 1;
  machine.attach(lock, rank);
  return machine.failed() ? 1 : 0;
}

int hw_cpu_detach(void) {
  Machine& machine = Machine::get();
  Lock lock(machine.mutex);
  if (this_thread().attached) machine.detach(lock);
  if (machine.failed()) machine.wait_for_running_work(lock);  // The caller may free memory that this work uses.
  return machine.failed() ? 1 : 0;
}

int hw_cpu_barrier(int participants) {
  Call call;
  Machine& machine = Machine::get();
  if (machine.failed()) return 1;
  const int device = this_thread().device;
  Machine::Barrier& barrier = machine.barrier;
  barrier.gathering.join(*machine.host_clock(device));
  const std::uint64_t mine = barrier.generation;
  if (++barrier.arrived == participants) {
    barrier.gathered = std::make_shared<Clock>(barrier.gathering);
    barrier.arrived = 0;
    ++barrier.generation;
    machine.progress();
  }
  if (!machine.wait(call.lock, "a barrier of " + std::to_string(participants) + " threads",
                    [&barrier, mine] { return barrier.generation != mine; })) {
    return 1;
  }
  machine.learn(device, barrier.gathered);
  return 0;
}

int hw_cpu_pause(void) {
  Call call;
  if (!Machine::get().failed()) Machine::get().pause(call.lock);
  return Machine::get().failed() ? 1 : 0;
}

void hw_cpu_abort(const char* reason) {
  Lock lock(Machine::get().mutex);
  Machine::get().fail(std::string("aborted: ") + (reason ? reason : ""));
}

void hw_cpu_fail_call(const char* call, int nth) {
  const Lock lock(Machine::get().mutex);
  Machine::get().fail_call(call, nth);
}

void hw_cpu_location(const char* file, int line, const char* call) {
  // Last interned location of this thread. A call with the same file and text reuses the location without the lock.
  thread_local struct {
    const char *file = nullptr, *call = nullptr;
    Location location;
  } last;
  Machine& machine = Machine::get();
  Location& location = this_thread().location;
  const bool same = last.file == file && last.call == call && std::strcmp(last.location.file, file) == 0 &&
                    std::strcmp(last.location.call, call) == 0;
  if (!same) {
    const Lock lock(machine.mutex);
    last.file = file;
    last.call = call;
    last.location = {machine.intern(file), line, machine.intern(call)};
  }
  location = last.location;
  location.line = line;
}

const char* hw_cpu_last_report(void) {
  thread_local std::string text;
  const Lock lock(Machine::get().mutex);
  text = Machine::get().failed() ? Machine::get().report() : last_error_text();
  return text.c_str();
}

int hw_cpu_failed(void) {
  const Lock lock(Machine::get().mutex);
  return Machine::get().failed();
}

void hw_cpu_get_counters(hw_cpu_counters* counters) {
  Machine& machine = Machine::get();
  const Lock lock(machine.mutex);
  counters->ops = machine.ops_done();
  counters->steps = machine.picker->steps();
  counters->schedule = machine.picker->hash();
  counters->live_bytes = machine.memory.live_bytes();
  counters->live_streams = machine.live_streams();
  counters->live_events = machine.events.size();
  counters->live_communicators = machine.communicators.size();
  counters->allocations = machine.memory.made();
  counters->copied_bytes = machine.copied_bytes;
}

cudaError_t hw_cpu_launch(const char* name, cudaStream_t stream, void (*run)(void* closure), const void* closure,
                          size_t closure_bytes, const hw_cpu_range* ranges, int range_count, int subject) {
  Call call;
  OpPtr op = new_op(Machine::get().intern(name), subject);
  for (int i = 0; i < range_count; ++i) {
    const hw_cpu_range& r = ranges[i];
    op->ranges.push_back(r.write ? write_of(r.pointer, r.bytes, r.rows, r.pitch) : read_of(r.pointer, r.bytes, r.rows, r.pitch));
  }
  // The element type aligns the copy for any closure without extended alignment.
  std::vector<std::max_align_t> copy((closure_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  if (closure_bytes != 0) std::memcpy(copy.data(), closure, closure_bytes);
  op->work = [run, copy = std::move(copy)]() mutable { run(copy.data()); };
  return submit(call.lock, std::move(op), stream);
}

void hw_cpu_split(size_t count, void (*run)(void* closure, size_t i), void* closure) {
  Machine::get().split(count, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) run(closure, i);
  });
}

}  // extern "C"
