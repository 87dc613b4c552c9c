#include "program.h"

#include "hostweave/check.h"
#include "hostweave/types.h"

namespace programs::set {

Program::Program(hw::Rank& rank) : rank_(rank.expect_world(kWorld)), loop_(rank, "loop", 3) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device(), "bf16[M, N]");
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 3);
  const int64_t N = in.x.dim(1);
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
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // single_device.py:16  return hw.copy(x).stream("M", chunks=S)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * (M / 3 * N);
    auto* y_i = y + i * (M / 3 * N);
    HW_CHECK(cudaMemcpyAsync(y_i, x_i, M / 3 * N * sizeof(hw::bf16), cudaMemcpyDeviceToDevice, stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::set
