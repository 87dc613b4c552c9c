#include "program.h"

#include "hostweave/check.h"
#include "kernels.h"

namespace programs::three_ops {

Program::Program(hw::Rank& rank) : rank_(rank.expect_world(kWorld)), loop_(rank, "loop", 3) {
  HW_CHECK(hw::load(negative_a));
  HW_CHECK(hw::load(multiply_b));
  HW_CHECK(hw::load(add_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M, N]");
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 3);
  const int64_t N = in.x.dim(1);
  return {M, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, N] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    hw::MemoryPlan memory;
    memory.allocate(a_, M * N);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.y = {M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // single_device.py:52  a = hw.negative(x).stream("M", chunks=S).named("a")
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * (M / 3 * N);
    auto* a_i = a_ + i * (M / 3 * N);
    HW_CHECK(hw::launch_pdl(negative_a, hw::grid_of_elements<8>(M / 3 * N), stream, x_i, a_i, M / 3 * N));
  }
  HW_CHECK(loop_.join(caller));
  // single_device.py:53  b = (a * x).named("b")  # not streamed: between two loops
  HW_CHECK(hw::launch_pdl(multiply_b, hw::grid_of_elements<8>(M * N), caller, a_, x, a_, M * N));
  // single_device.py:54  return (b + x).stream("M", chunks=S)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    auto* b_i = a_ + i * (M / 3 * N);
    const auto* x_i = x + i * (M / 3 * N);
    auto* y_i = y + i * (M / 3 * N);
    HW_CHECK(hw::launch_pdl(add_y, hw::grid_of_elements<8>(M / 3 * N), stream, b_i, x_i, y_i, M / 3 * N));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::three_ops
