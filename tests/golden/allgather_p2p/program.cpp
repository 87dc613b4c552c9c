#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/types.h"

namespace programs::allgather_p2p {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)), channel_x_(rank.channel(kMesh, "x", 4)), loop_(rank, "loop", 4) {}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", CUDA_R_16BF, {1, hw::kAny}, rank_.device(), "bf16[1, N]");
  const int64_t N = in.x.dim(1);
  return {N};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [N] = *prepared_;
  return {.y = {4, N}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [N] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {4, N}, rank_.device(), "bf16[4, N]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [N] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  // seeds.py:54  return hw.reshard(x, D, "N").stream(0)
  HW_CHECK(loop_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    const hw::Stream stream = loop_[i];
    auto* y_i = y + p * N;
    if (i == 0) {
      HW_CHECK(cudaMemcpyAsync(y_i, x, N * sizeof(hw::bf16), cudaMemcpyDeviceToDevice, stream));
    } else {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(y_i, N, ncclBfloat16, p, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(x, N, ncclBfloat16, (rank_x - i + 4) % 4, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(loop_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::allgather_p2p
