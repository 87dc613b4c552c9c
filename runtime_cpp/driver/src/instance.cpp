#include "hostweave/instance.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "hostweave/marks.h"
#include "target.h"

namespace hw {
namespace {

constexpr size_t kGraphs = 16;  // maximum number of argument sets that an Instance remembers, with or without a graph

// Captures the work that `enqueue` enqueues. Calls of other threads do not affect the capture.
cudaGraph_t captured_on(cudaStream_t stream, const std::function<void()>& enqueue) {
  HW_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  HW_CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

// Runs a call during which work is captured. Throws CaptureError if the call fails.
template <class Call>
auto captured(const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    cudaGetLastError();
    throw CaptureError(std::string("cannot be captured: ") + error.what());
  }
}

}  // namespace

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t cudaStreamGetCaptureInfo = ::cudaStreamGetCaptureInfo(stream, &status);
  if (cudaStreamGetCaptureInfo == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    throw CaptureError("the default stream cannot be used while another stream is captured; pass stream=");
  }
  HW_CHECK(cudaStreamGetCaptureInfo);
  return status != cudaStreamCaptureStatusNone;
}

Pulse::Pulse() {
  HW_CHECK(cudaMemsetAsync(set_.reserve(sizeof *begun_), 0xff, sizeof *begun_, stream_));
  HW_CHECK(cudaStreamSynchronize(stream_));
  HW_CHECK(cudaMallocHost(reinterpret_cast<void**>(&begun_), sizeof *begun_));
  *begun_ = 0;
}

Pulse::~Pulse() {
  set_ = {};  // waits for copies to the word
  cudaFreeHost(begun_);
}

// Sets `*begun_` by a copy on a forked stream, so that the work of the graph does not wait for the copy.
void Pulse::begin(cudaStream_t caller) {
  HW_CHECK(cudaEventRecord(fork_[0], caller));
  HW_CHECK(cudaStreamWaitEvent(stream_, fork_[0], 0));
  HW_CHECK(cudaMemcpyAsync(begun_, set_.data(), sizeof *begun_, cudaMemcpyDeviceToHost, stream_));
  HW_CHECK(cudaEventRecord(join_[0], stream_));
}

void Pulse::end(cudaStream_t caller) {
  HW_CHECK(cudaStreamWaitEvent(caller, join_[0], 0));
  HW_CHECK(cudaEventRecordWithFlags(done_[0], caller, cudaEventRecordExternal));
}

bool Pulse::stands_still() {
  const bool begun = std::atomic_ref(*begun_).exchange(0) != 0;
  return cudaEventQuery(done_[0]) == cudaErrorNotReady && !begun;
}

CallLog::State Progress::look() {
  CallLog::State state = log.state();
  const BesideCaptures beside;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  stands_since_ = pulse.stands_still() ? std::min(stands_since_, now) : Clock::time_point::max();
  state.waiting_seconds = std::max(state.waiting_seconds, std::chrono::duration<double>(now - stands_since_).count());
  return state;
}

CallLog::State Instance::progress() {
  const OnDevice device(member_.rank().device());
  return progress_->look();
}

Standstill Instance::standstill() {
  const OnDevice device(member_.rank().device());
  Standstill standstill;
  progress_->log.look(standstill);
  return standstill;
}

Instance::Instance(Member& member, const ProgramTable& program, bool measures, bool marks_graphs)
    : member_(member), program_(program), measures_(measures) {
  const Member::Use use(member_);
  progress_.emplace();
  // This call allocates memory, which is impossible in a capture.
  marks_graphs_ = progress_->log.prepare_capture(marks_graphs);
  prepare_to_straighten();
  instance_ = program_.calls.create(member_.rank());
  inputs_ = program_.calls.inputs.tensors();
  outputs_ = program_.calls.outputs.tensors();
  for (std::vector<Tensor>* tensors : {&inputs_, &outputs_}) {
    for (Tensor& tensor : *tensors) tensor.device = member_.rank().device();
  }
}

Instance::~Instance() {
  try {
    const Member::Use use(member_, true);
    seen_.clear();
    program_.calls.destroy(instance_);
    progress_.reset();
  } catch (const std::exception&) {
    // A destructor must not throw, so `instance_` may stay allocated.
  }
}

std::vector<Shape> Instance::prepare(const std::vector<Input>& inputs, cudaStream_t caller) {
  const Member::Use use(member_);
  if (is_captured(caller)) {
    throw CaptureError(
        "the stream is being captured, and the program is not prepared for arrays of these shapes; call it once before");
  }
  shapes_.reset();  // stays empty if an error follows
  std::vector<Shape> outputs(outputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    inputs_[i].data = this;  // not accessed; replaces the pointer of an earlier call, which may be null
    inputs_[i].shape = inputs[i].shape;
    inputs_[i].global_shape = inputs[i].global_shape;
  }
  member_.rank().set_measures(measures_);
  program_.calls.prepare(instance_, inputs_.data(), outputs.data());
  // Drops graphs that use earlier memory.
  if (std::vector<void*> now = memory(); now != memory_) {
    memory_ = std::move(now);
    seen_.clear();
  }
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i].shape = outputs[i];
  const auto known = std::ranges::find_if(seen_, [&](const Seen& seen) { return *seen.shapes == inputs; });
  shapes_ = known != seen_.end() ? known->shapes : std::make_shared<const std::vector<Input>>(inputs);
  return outputs;
}

std::vector<void*> Instance::memory() const {
  std::vector<void*> parts;
  size_t bytes = 0;
  while (void* const part = program_.calls.arena(instance_, parts.size(), &bytes)) parts.push_back(part);
  return parts;
}

void Table::fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const {
  const auto is_free = [](const std::optional<void*>& data) { return !data; };
  if (inputs.size() != static_cast<size_t>(std::ranges::count_if(bound, is_free)) || bound.size() != tensors.size())
    throw ArgumentError("a wrong number of arrays");
  auto next = inputs.begin();
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = bound[i] ? *bound[i] : *next++;
}

void Instance::take(const Table& table, const std::vector<void*>& inputs, const std::vector<void*>& outputs) {
  expect_prepared(shapes_ != nullptr);
  table.fill(inputs, inputs_);
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i].data = outputs[i];
}

template <class Work>
void Instance::call(cudaStream_t caller, const Work& enqueue_or_launch) {
  const Range range(program_.name);
  progress_->log.begin_call();
  enqueue_or_launch();
  progress_->log.end_call(caller);
}

template <class Work>
void Instance::or_stop(const Work& work) {
  try {
    work();
    target::finish();
  } catch (const std::exception& error) {  // Stops the other ranks before the Member::Use of the caller ends.
    const std::string report = target::report();
    member_.stop(!report.empty() ? report
                                 : "rank " + std::to_string(member_.rank().index()) + ": " + program_.name + ": " + error.what());
    if (!report.empty()) throw ExecutionError(report);
    throw;
  }
}

void Instance::run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs,
                   const std::vector<void*>& outputs, cudaStream_t caller, Graphs graphs) {
  const Member::Use use(member_, schedule);
  take(table, inputs, outputs);
  if (is_captured(caller)) return enqueue_captured(caller);
  const Graph* const graph = graphs == Graphs::never ? nullptr : graph_of_taken(graphs);
  or_stop([&] { call(caller, [&] { graph ? launch(*graph, caller) : enqueue(caller); }); });
}

void Instance::run_staged(const Schedule& schedule, const Staging& staging, bool poison) {
  const Member::Use use(member_, schedule);
  const cudaStream_t caller = staging.stream();
  or_stop([&] {
    target::meet(static_cast<int>(member_.rank().size()));
    for (const Staging::Call& staged : staging.calls()) {
      if (poison) fill(staged, caller);
      staging.upload(staged);
      take(staged.placed_inputs, {}, staged.placed_outputs);
      call(caller, [&] { enqueue(caller); });
      staging.download(staged);
    }
    finish(caller);
  });
}

std::vector<Timing> Instance::measure(const Schedule& schedule, const Staging& staging, int warmups, int repetitions,
                                      Gate& gate) {
  using Clock = std::chrono::steady_clock;
  const Member::Use use(member_, schedule);
  const cudaStream_t caller = staging.stream();
  const Staging::Call& staged = staging.calls().front();
  std::vector<Timing> timings;
  or_stop([&] {
    const Gate::Opening at_end(gate);  // Releases the streams if a rank fails.
    const Event begin(cudaEventDefault), end(cudaEventDefault);
    Marks marks;
    staging.upload(staged);
    take(staged.placed_inputs, {}, staged.placed_outputs);
    for (int i = 0; i < warmups + repetitions; ++i) {
      member_.synchronize(caller);
      target::meet(static_cast<int>(member_.rank().size()));
      gate.hold(caller, i);
      std::chrono::duration<double, std::micro> enqueued{};
      call(caller, [&] {
        HW_CHECK(cudaEventRecord(begin, caller));
        const auto start = Clock::now();
        enqueue(caller);
        enqueued = Clock::now() - start;
        HW_CHECK(cudaEventRecord(end, caller));
      });
      gate.enqueued(i);
      member_.synchronize(caller);
      float total_ms = 0;
      HW_CHECK(cudaEventElapsedTime(&total_ms, begin, end));
      std::vector<float> marks_ms = marks.take(begin);
      if (i >= warmups) timings.push_back({enqueued.count(), total_ms, std::move(marks_ms)});
    }
    staging.download(staged);
    finish(caller);
  });
  return timings;
}

void Instance::launch(const Schedule& schedule, const Graph& graph, cudaStream_t caller) {
  const Member::Use use(member_, schedule);
  if (is_captured(caller))
    throw CaptureError("the stream is being captured, and cannot launch another graph; call the program instead");
  or_stop([&] { call(caller, [&] { launch(graph, caller); }); });
}

void Instance::enqueue(cudaStream_t caller, bool is_marked) {
  const CallLog::Adding adding(progress_->log, caller, is_marked);
  program_.calls.enqueue(instance_, inputs_.data(), outputs_.data(), caller);
}

void Instance::launch(const Graph& graph, cudaStream_t caller) const {
  HW_CHECK(program_.calls.begin_call(instance_, caller));
  graph.launch(caller);
  HW_CHECK(program_.calls.end_call(instance_, caller));
}

std::unique_ptr<Graph> Instance::capture(const Table& table, const std::vector<void*>& inputs,
                                         const std::vector<void*>& outputs) {
  const Member::Use use(member_);  // A capture does not need the other ranks.
  take(table, inputs, outputs);
  return capture_taken();
}

void Instance::fill(const Staging::Call& call, cudaStream_t caller) const {
  for (size_t i = 0; i < call.outputs.size(); ++i)
    HW_CHECK(cudaMemsetAsync(call.placed_outputs[i], 0xff, call.outputs[i].bytes, caller));
  size_t bytes = 0;
  for (size_t part = 0; void* const memory = program_.calls.arena(instance_, part, &bytes); ++part)
    HW_CHECK(cudaMemsetAsync(memory, 0xff, bytes, caller));
}

// Waits for the calls, and then for streams that an incorrect program did not join.
void Instance::finish(cudaStream_t caller) const {
  member_.synchronize(caller);
  HW_CHECK(cudaDeviceSynchronize());
}

void Instance::enqueue_captured(cudaStream_t caller) {
  captured([&] {
    progress_->pulse.begin(caller);
    const CallLog::Adding adding(progress_->log, caller, marks_graphs_);
    progress_->log.begins_launch();
    program_.calls.enqueue(instance_, inputs_.data(), outputs_.data(), caller);
    progress_->log.ends_launch();
    progress_->pulse.end(caller);
  });
}

std::unique_ptr<Graph> Instance::capture_taken() {
  return captured([&] {
    const OwnStream stream;
    const CallOrder::OfKernels order;
    const cudaGraph_t graph = captured_on(stream, [&] { enqueue(stream, marks_graphs_); });
    return std::make_unique<Graph>(member_, graph, stream, progress_->log);
  });
}

const Graph* Instance::graph_of_taken(Graphs graphs) {
  std::vector<void*> data;
  data.reserve(inputs_.size() + outputs_.size());
  for (const auto* tensors : {&inputs_, &outputs_})
    for (const Tensor& tensor : *tensors) data.push_back(tensor.data);
  const auto found = std::ranges::find_if(seen_, [&](const Seen& seen) { return seen.shapes == shapes_ && seen.data == data; });
  const bool is_new = found == seen_.end();
  if (is_new) {
    ++unseen_;
    if (seen_.size() == kGraphs) seen_.pop_back();
    seen_.push_front({std::move(data), shapes_, nullptr});
  } else {
    seen_.splice(seen_.begin(), seen_, found);
  }
  if (graphs == Graphs::noted || (graphs == Graphs::repeated && is_new)) return nullptr;
  if (!seen_.front().graph) seen_.front().graph = capture_taken();
  return seen_.front().graph.get();
}

int64_t Instance::graphs() const {
  return std::ranges::count_if(seen_, [](const Seen& seen) { return seen.graph != nullptr; });
}

Graph::Graph(Member& member, cudaGraph_t graph, cudaStream_t stream, CallLog& log)
    : member_(member), log_(log), ops_(log.captured()) {
  events_ = straighten(graph, stream);
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> taken(graph, cudaGraphDestroy);
  HW_CHECK(cudaGraphInstantiateWithFlags(&exec_, graph, 0));
  member_.add_graph(exec_);
  HW_CHECK(cudaGraphUpload(exec_, stream));
  HW_CHECK(cudaStreamSynchronize(stream));
}

Graph::~Graph() {
  member_.destroy_graph(exec_);
  log_.forget(ops_);
}

void Graph::launch(cudaStream_t stream) const {
  for (const cudaEvent_t event : events_.awaited) HW_CHECK(cudaStreamWaitEvent(stream, event, 0));
  log_.launches(ops_);
  HW_CHECK(cudaGraphLaunch(exec_, stream));
  for (const cudaEvent_t event : events_.recorded) HW_CHECK(cudaEventRecord(event, stream));
}

}  // namespace hw
