// kernel @relu_h(%product: bf16[M/4, part(N, x on ranks 0, 1)]) {
//   %h: bf16[M/4, part(N, x on ranks 0, 1)] = relu(%product)
// }  # ends here: matmul uses %h
// kernel @relu_g(%product_3: bf16[M/4, part(N, x on ranks 2, 3)]) {
//   %g: bf16[M/4, part(N, x on ranks 2, 3)] = relu(%product_3)
// }  # ends here: matmul uses %g
// host @two_stages_streamed(%x: bf16[M, K] on mesh(x=2 of ranks 0, 1), %up1: bf16[K, N@x] on mesh(x=2 of ranks 0, 1), %down1:
// bf16[N@x, K] on mesh(x=2 of ranks 0, 1), %up2: bf16[K, N@x] on mesh(x=2 of ranks 2, 3), %down2: bf16[N@x, K] on mesh(x=2 of
// ranks 2, 3)) -> (%y: bf16[M, K] on mesh(x=2 of ranks 2, 3)) mesh(x=4) streams(ring[4]) events(turn[1]) uneven(N) {
//   on mesh(x=2 of ranks 0, 1) {
//     %product = allocate bf16[M, part(N, x on ranks 0, 1)]
//     %h = allocate bf16[M, part(N, x on ranks 0, 1)]
//     %product_2 = allocate bf16[M, K]
//     %layer = allocate bf16[M, K]
//   }
//   on mesh(x=2 of ranks 2, 3) {
//     %arrived = allocate bf16[M, K]
//     %product_3 = allocate bf16[M, part(N, x on ranks 2, 3)]
//     %g = allocate bf16[M, part(N, x on ranks 2, 3)]
//     %product_4 = allocate bf16[M, K]
//   }
//   fork ring
//   record turn[0]
//   for %j in 0..5 {
//     if %j < 4 {
//       stream ring[%j] {
//         on mesh(x=2 of ranks 2, 3) {
//           wait turn[0]
//           %arrived_j = slice %arrived[0: %j of 4]
//           recv %arrived_j from rank - 2 on *
//           record turn[0]
//         }
//       }
//     }
//     if %j > 0 {
//       %i = %j - 1
//       stream ring[%i] {
//         on mesh(x=2 of ranks 0, 1) {
//           %x_i = slice %x[0: %i of 4]
//           %product_i = slice %product[0: %i of 4]
//           matmul %x_i, %up1 -> %product_i
//           %h_i = slice %h[0: %i of 4]
//           launch @relu_h %product_i -> %h_i
//           %product_2_i = slice %product_2[0: %i of 4]
//           matmul %h_i, %down1 -> %product_2_i
//           wait turn[0]
//           %layer_i = slice %layer[0: %i of 4]
//           all_reduce sum %product_2_i -> %layer_i on x
//           send %layer_i to rank + 2 on *
//           record turn[0]
//         }
//         on mesh(x=2 of ranks 2, 3) {
//           %arrived_i = slice %arrived[0: %i of 4]
//           %product_3_i = slice %product_3[0: %i of 4]
//           matmul %arrived_i, %up2 -> %product_3_i
//           %g_i = slice %g[0: %i of 4]
//           launch @relu_g %product_3_i -> %g_i
//           %product_4_i = slice %product_4[0: %i of 4]
//           matmul %g_i, %down2 -> %product_4_i
//           wait turn[0]
//           %y_i = slice %y[0: %i of 4]
//           all_reduce sum %product_4_i -> %y_i on x
//           record turn[0]
//         }
//       }
//     }
//   }
//   join ring
// }
#include "program.h"

#include "hostweave/check.h"
#include "hostweave/shards.h"
#include "kernels.h"

namespace programs::two_stages_streamed {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      on_ranks_0_1_(rank.index() < 2),
      on_ranks_2_3_(rank.index() >= 2),
      team_x_(rank.channel(kMesh, "x", 4)),
      team_x_of_ranks_0_1_(on_ranks_0_1_ ? rank.channel("mesh(x=2 of ranks 0, 1)", "x", 2) : hw::kNoChannel),
      team_x_of_ranks_2_3_(on_ranks_2_3_ ? rank.channel("mesh(x=2 of ranks 2, 3)", "x", 2) : hw::kNoChannel),
      ring_(rank, "ring", 4),
      turn_(1),
      plan_product_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_product_2_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_product_3_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_product_4_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(relu_h));
  HW_CHECK(hw::load(relu_g));
}

Sizes Program::check(const Inputs& in) const {
  if (on_ranks_0_1_) in.x.expect("x", "bf16[M, K]", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device());
  const int64_t M = in.x.whole_dim(0, 1);
  hw::expect_divisible("M", M, 4);
  const int64_t K = in.x.whole_dim(1, 1);
  if (on_ranks_0_1_) in.x.expect("x", "bf16[M, K]", CUDA_R_16BF, {M, K}, rank_.device());
  if (on_ranks_0_1_) in.up1.expect("up1", "bf16[K, part(N, x on ranks 0, 1)]", CUDA_R_16BF, {K, hw::kAny}, rank_.device());
  const int64_t N = in.up1.whole_dim(1, 2);
  const int64_t N_x_of_ranks_0_1 = hw::part(N, 2, rank_.index());
  const int64_t N_x_of_ranks_2_3 = hw::part(N, 2, rank_.index() - 2);
  if (on_ranks_0_1_)
    in.up1.expect("up1", "bf16[K, part(N, x on ranks 0, 1)]", CUDA_R_16BF, {K, N_x_of_ranks_0_1}, rank_.device());
  if (on_ranks_0_1_)
    in.down1.expect("down1", "bf16[part(N, x on ranks 0, 1), K]", CUDA_R_16BF, {N_x_of_ranks_0_1, K}, rank_.device());
  if (on_ranks_2_3_)
    in.up2.expect("up2", "bf16[K, part(N, x on ranks 2, 3)]", CUDA_R_16BF, {K, N_x_of_ranks_2_3}, rank_.device());
  if (on_ranks_2_3_)
    in.down2.expect("down2", "bf16[part(N, x on ranks 2, 3), K]", CUDA_R_16BF, {N_x_of_ranks_2_3, K}, rank_.device());
  return {M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3};
}

OutputShapes Program::output_shapes(const Inputs& in) const {
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = check(in);
  return {.y = {M, K}};
}

void Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  if (prepared_ == sizes) return;
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = sizes;
  prepared_.reset();
  if (on_ranks_0_1_) plan_product_.prepare({M / 4, K}, {K, N_x_of_ranks_0_1}, {M / 4, N_x_of_ranks_0_1});
  if (on_ranks_0_1_) plan_product_2_.prepare({M / 4, N_x_of_ranks_0_1}, {N_x_of_ranks_0_1, K}, {M / 4, K});
  if (on_ranks_2_3_) plan_product_3_.prepare({M / 4, K}, {K, N_x_of_ranks_2_3}, {M / 4, N_x_of_ranks_2_3});
  if (on_ranks_2_3_) plan_product_4_.prepare({M / 4, N_x_of_ranks_2_3}, {N_x_of_ranks_2_3, K}, {M / 4, K});
  hw::MemoryPlan memory;
  if (on_ranks_0_1_) {
    memory.allocate(product_, M * N_x_of_ranks_0_1);
    memory.allocate(h_, M * N_x_of_ranks_0_1);
    memory.allocate(product_2_, M * K);
    memory.allocate(layer_, M * K);
  }
  if (on_ranks_2_3_) {
    memory.allocate(arrived_, M * K);
    memory.allocate(product_3_, M * N_x_of_ranks_2_3);
    memory.allocate(g_, M * N_x_of_ranks_2_3);
    memory.allocate(product_4_, M * K);
  }
  arena_.reserve(memory);
  prepared_ = sizes;
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const Sizes sizes = check(in);
  hw::expect_prepared(prepared_ == sizes);
  const auto [M, K, N, N_x_of_ranks_0_1, N_x_of_ranks_2_3] = sizes;
  if (on_ranks_2_3_) out.y.expect("y", "bf16[M, K]", CUDA_R_16BF, {M, K}, rank_.device());

  const auto* x = in.x.as<hw::bf16>();
  const auto* up1 = in.up1.as<hw::bf16>();
  const auto* down1 = in.down1.as<hw::bf16>();
  const auto* up2 = in.up2.as<hw::bf16>();
  const auto* down2 = in.down2.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  HW_CHECK(ring_.fork(caller));
  HW_CHECK(cudaEventRecord(turn_[0], caller));
  for (int64_t j = 0; j < 5; ++j) {
    if (j < 4) {
      const hw::Stream stream = ring_[j];
      if (on_ranks_2_3_) {
        HW_CHECK(cudaStreamWaitEvent(stream, turn_[0], 0));
        auto* arrived_j = arrived_ + j * (M / 4 * K);
        HW_CHECK(ncclRecv(arrived_j, M / 4 * K, ncclBfloat16, rank - 2, team_x_.comm(), stream));
        HW_CHECK(cudaEventRecord(turn_[0], stream));
      }
    }
    if (j > 0) {
      const int64_t i = j - 1;
      const hw::Stream stream = ring_[i];
      if (on_ranks_0_1_) {
        const auto* x_i = x + i * (M / 4 * K);
        auto* product_i = product_ + i * (M / 4 * N_x_of_ranks_0_1);
        HW_CHECK(plan_product_.cublasLtMatmul(x_i, up1, product_i, stream));
        auto* h_i = h_ + i * (M / 4 * N_x_of_ranks_0_1);
        HW_CHECK(hw::launch(relu_h, hw::grid_of_elements<8>(M / 4 * N_x_of_ranks_0_1), stream,
                            hw::reads(product_i, M / 4 * N_x_of_ranks_0_1), hw::writes(h_i, M / 4 * N_x_of_ranks_0_1), M,
                            N_x_of_ranks_0_1));
        auto* product_2_i = product_2_ + i * (M / 4 * K);
        HW_CHECK(plan_product_2_.cublasLtMatmul(h_i, down1, product_2_i, stream));
        HW_CHECK(cudaStreamWaitEvent(stream, turn_[0], 0));
        auto* layer_i = layer_ + i * (M / 4 * K);
        HW_CHECK(ncclAllReduce(product_2_i, layer_i, M / 4 * K, ncclBfloat16, ncclSum, team_x_of_ranks_0_1_.comm(), stream));
        HW_CHECK(ncclSend(layer_i, M / 4 * K, ncclBfloat16, rank + 2, team_x_.comm(), stream));
        HW_CHECK(cudaEventRecord(turn_[0], stream));
      }
      if (on_ranks_2_3_) {
        auto* arrived_i = arrived_ + i * (M / 4 * K);
        auto* product_3_i = product_3_ + i * (M / 4 * N_x_of_ranks_2_3);
        HW_CHECK(plan_product_3_.cublasLtMatmul(arrived_i, up2, product_3_i, stream));
        auto* g_i = g_ + i * (M / 4 * N_x_of_ranks_2_3);
        HW_CHECK(hw::launch(relu_g, hw::grid_of_elements<8>(M / 4 * N_x_of_ranks_2_3), stream,
                            hw::reads(product_3_i, M / 4 * N_x_of_ranks_2_3), hw::writes(g_i, M / 4 * N_x_of_ranks_2_3), M,
                            N_x_of_ranks_2_3));
        auto* product_4_i = product_4_ + i * (M / 4 * K);
        HW_CHECK(plan_product_4_.cublasLtMatmul(g_i, down2, product_4_i, stream));
        HW_CHECK(cudaStreamWaitEvent(stream, turn_[0], 0));
        auto* y_i = y + i * (M / 4 * K);
        HW_CHECK(ncclAllReduce(product_4_i, y_i, M / 4 * K, ncclBfloat16, ncclSum, team_x_of_ranks_2_3_.comm(), stream));
        HW_CHECK(cudaEventRecord(turn_[0], stream));
      }
    }
  }
  HW_CHECK(ring_.join(caller));
  HW_CHECK(arena_.end_call(caller));
}

}  // namespace programs::two_stages_streamed
