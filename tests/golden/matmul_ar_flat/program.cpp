#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "hostweave/types.h"

namespace programs::matmul_ar_flat {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      loop_(rank, "loop", 3),
      plan_y_(rank, CUDA_R_16BF, CUDA_R_16BF) {}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 3);
  const int64_t K = in.x.global_dim(1, 4);
  const int64_t K_x = hw::local_size(K, 4, rank_.index());
  in.x.expect("x", CUDA_R_16BF, {M, K_x}, rank_.device(), "bf16[M, local(K, x)]");
  in.w.expect("w", CUDA_R_16BF, {K_x, hw::kAny}, rank_.device(), "bf16[local(K, x), N]");
  const int64_t N = in.w.dim(1);
  return {M, K, N, K_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, K, N, K_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_y_.prepare({M / 3, K_x}, {K_x, N}, {M / 3, N});
    prepared_ = sizes;
  }
  return {.y = {M, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, K, N, K_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M, N}, rank_.device(), "bf16[M, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, K, N, K_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // seeds.py:77  return hw.reshard(hw.matmul(x, w), "M", "N").stream("M", chunks=S)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 3; ++i) {
    const hw::Stream stream = loop_[i];
    const auto* x_i = x + i * (M / 3 * K_x);
    auto* y_i = y + i * (M / 3 * N);
    HW_CHECK(plan_y_.multiply(x_i, w, y_i, stream));
    HW_CHECK(ncclAllReduce(y_i, y_i, M / 3 * N, ncclBfloat16, ncclSum, channel_x_.comm(), stream));
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::matmul_ar_flat
