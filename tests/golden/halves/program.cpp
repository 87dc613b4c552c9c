#include "program.h"

#include "hostweave/check.h"
#include "hostweave/index.h"
#include "kernels.h"

namespace programs::halves {

Program::Program(hw::Rank& rank) : rank_(rank.expect_world(kWorld)), plan_h_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(negative_concat_joined));
  HW_CHECK(hw::load(relu_pad_relu_x_padded));
}

Sizes Program::check(const Inputs& in) const {
  const int64_t M = in.x.global_dim(0, 4);
  const int64_t M_x = hw::local_size(M, 4, rank_.index());
  in.x.expect("x", CUDA_R_16BF, {M_x, 8}, rank_.device(), "bf16[local(M, x), 8]");
  in.w.expect("w", CUDA_R_16BF, {8, 3}, rank_.device());
  return {M, M_x};
}

OutputShapes Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  const auto [M, M_x] = sizes;
  if (prepared_ != sizes) {
    prepared_.reset();  // stays empty if an error follows
    plan_h_.prepare({M_x, 8}, {8, 3}, {M_x, 3});
    hw::MemoryPlan memory;
    memory.allocate(workspace_, hw::kWorkspaceBytes);
    memory.allocate(h_, 3 * M_x);
    arena_.reserve(memory);
    prepared_ = sizes;
  }
  return {.joined = {M_x, 11}, .relu_x_padded = {M_x, 3}};
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  hw::expect_prepared(prepared_ == check(in));
  const auto [M, M_x] = *prepared_;
  out.joined.expect("joined", CUDA_R_16BF, {M_x, 11}, rank_.device(), "bf16[local(M, x), 11]");
  out.relu_x_padded.expect("relu_x_padded", CUDA_R_16BF, {M_x, 3}, rank_.device(), "bf16[local(M, x), 3]");
  enqueue(in, out, caller);
}

void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const auto [M, M_x] = *prepared_;
  const auto* x = in.x.as<hw::bf16>();
  const auto* w = in.w.as<hw::bf16>();
  auto* joined = out.joined.as<hw::bf16>();
  auto* relu_x_padded = out.relu_x_padded.as<hw::bf16>();

  HW_CHECK(arena_.begin_call(caller));
  // fusions_beyond_examples.py:73  h = hw.matmul(x, w).named("h")
  HW_CHECK(plan_h_.multiply(x, w, h_, {caller, workspace_}));
  // fusions_beyond_examples.py:75  joined = hw.concat([x[:, 4:], -x[:, :4], h[:, ::2], h[:, 1:2]], axis=1)
  const auto* x_from_4 = x + 4;
  auto* h_from_1 = h_ + 1;
  HW_CHECK(
      hw::launch_pdl(negative_concat_joined, hw::grid_of_elements(11 * M_x), caller, x, x_from_4, h_, h_from_1, joined, M_x));
  // fusions_beyond_examples.py:76  return joined, hw.pad(hw.relu(x[:, 1:3]), (1, 0), value=1)
  const auto* x_from_1 = x + 1;
  HW_CHECK(hw::launch_pdl(relu_pad_relu_x_padded, hw::grid_of_elements(3 * M_x), caller, x_from_1, relu_x_padded, M_x));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::halves
