#include "hostweave/instance.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "hostweave/check.h"
#include "hostweave/errors.h"
#include "world_target.h"

namespace hw {

void Progress::begin() {
  const std::lock_guard lock(mutex_);
  ++made_;
  enqueuing_ = true;
  began_ = Clock::now();
}

void Progress::end(cudaStream_t caller) {
  const std::lock_guard lock(mutex_);
  enqueuing_ = false;
  Mark& mark = older_.call == 0 ? older_ : newest_;
  HW_CHECK(cudaEventRecord(events_[mark.event], caller));
  mark.call = made_;
  mark.at = began_;
}

Progress::State Progress::look() {
  const std::lock_guard lock(mutex_);
  while (older_.call != 0 && cudaEventQuery(events_[older_.event]) == cudaSuccess) {
    done_ = older_.call;
    older_.call = 0;
    std::swap(older_, newest_);
  }
  State state{made_, done_, 0};
  const auto since = [](Clock::time_point at) { return std::chrono::duration<double>(Clock::now() - at).count(); };
  if (older_.call != 0) {
    state.waiting_seconds = since(older_.at);
  } else if (enqueuing_) {
    state.waiting_seconds = since(began_);
  }
  return state;
}

Progress::State Instance::progress() {
  const OnDevice device(member_.rank().device());
  return progress_->look();
}

Instance::Instance(Member& member, const ProgramTable& program) : member_(member), program_(program) {
  member_.expect_working();
  const Member::Use use(member_);
  progress_.emplace();
  instance_ = program_.calls.create(member_.rank());
  const auto tensor = [&](const Argument& argument) { return Tensor{nullptr, argument.dtype, {}, member_.rank().device()}; };
  for (const Argument& input : program_.inputs) inputs_.push_back(tensor(input));
  for (const Argument& output : program_.outputs) outputs_.push_back(tensor(output));
}

Instance::~Instance() {
  try {
    const Member::Use use(member_);
    program_.calls.destroy(instance_);
    progress_.reset();
  } catch (const std::exception&) {
    // Nothing more can be done for a device that does not even free.
  }
}

std::vector<Shape> Instance::prepare(const std::vector<Input>& inputs) {
  member_.expect_working();
  const Member::Use use(member_);
  std::vector<Shape> outputs(outputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    inputs_[i].shape = inputs[i].shape;
    inputs_[i].whole = inputs[i].whole;
  }
  program_.calls.output_shapes(instance_, inputs_.data(), outputs.data());
  program_.calls.prepare(instance_, inputs_.data());
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i].shape = outputs[i];
  return outputs;
}

void Table::fill(const std::vector<void*>& inputs, std::vector<Tensor>& tensors) const {
  const auto is_free = [](const std::optional<void*>& data) { return !data; };
  if (inputs.size() != static_cast<size_t>(std::ranges::count_if(bound_, is_free)) || bound_.size() != tensors.size())
    throw ArgumentError("a wrong number of arrays");
  auto next = inputs.begin();
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = bound_[i] ? *bound_[i] : *next++;
}

void Instance::run(const Schedule& schedule, const Table& table, const std::vector<void*>& inputs,
                   const std::vector<void*>& outputs, cudaStream_t caller) {
  member_.expect_working();
  const Member::Use use(member_, schedule);
  table.fill(inputs, inputs_);
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i].data = outputs[i];
  try {
    progress_->begin();
    program_.calls.run(instance_, inputs_.data(), outputs_.data(), caller);
    progress_->end(caller);
    target::finish();
  } catch (const std::exception& error) {  // while in use: the others must not go on before they are stopped
    const std::string report = target::report();
    member_.stop(!report.empty() ? report
                                 : "rank " + std::to_string(member_.rank().index()) + ": " + program_.name + ": " + error.what());
    if (!report.empty()) throw ExecutionError(report);
    throw;
  }
}

}  // namespace hw
