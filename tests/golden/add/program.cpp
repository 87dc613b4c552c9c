#include "program.h"

#include "hostweave/check.h"
#include "hostweave/types.h"
#include "kernels.h"

namespace programs::add {

Program::Program(hw::Rank& rank) : rank_(rank.expect_world(kWorld)), loop_(rank, "loop", 3) { HW_CHECK(hw::load(add_y)); }

Sizes Program::check(const Inputs& in) const {
  in.a.expect("a", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M, N]");
  const int64_t M = in.a.dim(0);
  hw::expect_divisible("M", M, 3);
  const int64_t N = in.a.dim(1);
  in.b.expect("b", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  return {M, N};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [M, N] = *prepared_;
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
  const auto* a = in.a.as<hw::bf16>();
  const auto* b = in.b.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // single_device.py:21  return (a + b).stream("M", chunks=S)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* a_i = a + i * (M / 3 * N);
    const auto* b_i = b + i * (M / 3 * N);
    auto* y_i = y + i * (M / 3 * N);
    HW_CHECK(hw::launch_pdl(add_y, hw::grid_of_elements<8>(M / 3 * N), stream, a_i, b_i, y_i, M / 3 * N));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::add
