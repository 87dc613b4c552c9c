#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "hostweave/types.h"
#include "kernels.h"

namespace programs::two_outputs {

Program::Program(hw::Rank& rank) : rank_(rank.expect_world(kWorld)) { HW_CHECK(hw::load(add_sum_y_z)); }

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 4);
  const int64_t M_x = hw::local_size(M, 4, rank_.index());
  const int64_t N = in.x.dim(1);
  in.x.expect("x", CUDA_R_16BF, {M_x, N}, rank_.device(), "bf16[local(M, x), N]");
  in.b.expect("b", CUDA_R_16BF, {N}, rank_.device(), "bf16[N]");
  return {M, N, M_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  prepared_ = check(in);
  const auto [M, N, M_x] = *prepared_;
  return {.y = {M_x, N}, .z = {M_x}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, N, M_x] = *prepared_;
  out.y.expect("y", CUDA_R_16BF, {M_x, N}, rank_.device(), "bf16[local(M, x), N]");
  out.z.expect("z", CUDA_R_16BF, {M_x}, rank_.device(), "bf16[local(M, x)]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, N, M_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* b = in.b.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  auto* z = out.z.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:27  y = (x + b).named("y")
  // fusions_beyond_examples.py:28  return y, hw.sum(y, axis="N").named("z")
  HW_CHECK(hw::launch_pdl(add_sum_y_z, hw::grid_of_rows<8>(M_x, N), caller, x, b, y, z, N, M_x));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_outputs
