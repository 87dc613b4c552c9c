#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "hostweave/types.h"
#include "kernels.h"

namespace programs::allreduce_rows {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), channel_x_(rank.channel(kMesh, "x", 4)), loop_(rank, "loop", 3) {
  HW_CHECK(hw::load(sum_y_partial));
}

Sizes Program::check(const Inputs& in) const {
  const int64_t R = in.x.global_dim(0, 4);
  const int64_t R_x = hw::local_size(R, 4, rank_.index());
  const int64_t N = in.x.dim(1);
  hw::expect_divisible("N", N, 3);
  in.x.expect("x", CUDA_R_16BF, {R_x, N}, rank_.device(), "bf16[local(R, x), N]");
  return {R, N, R_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [R, N, R_x] = *prepared_;
  return {.y = {N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [R, N, R_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {N}, rank_.device(), "bf16[N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [R, N, R_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // single_device.py:59  return hw.sum(x, axis="R").stream("N", chunks=S)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * (N / 3);
    auto* y_i = y + i * (N / 3);
    HW_CHECK(hw::launch_pdl(sum_y_partial, hw::grid_of_columns(N / 3, 512), stream, x_i, y_i, N, R_x));
    HW_CHECK(ncclAllReduce(y_i, y_i, N / 3, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::allreduce_rows
