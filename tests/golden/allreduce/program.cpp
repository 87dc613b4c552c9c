#include "program.h"

#include "hostweave/check.h"
#include "hostweave/types.h"

namespace programs::allreduce {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), channel_x_(rank.channel(kMesh, "x", 4)), loop_(rank, "loop", 3) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {3, 1, hw::kAny}, rank_.device(), "bf16[3, 1, N]");
  const int64_t N = in.x.dim(2);
  return {N};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [N] = *prepared_;
  return {.y = {3, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {3, N}, rank_.device(), "bf16[3, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // seeds.py:25  return hw.sum(x, axis=1).stream(0)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * N;
    auto* y_i = y + i * N;
    HW_CHECK(ncclAllReduce(x_i, y_i, N, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::allreduce
