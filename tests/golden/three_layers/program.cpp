// kernel @maximum_minimum_h(%product: bf16[M, part(F, x)]) {
//   %maximum: bf16[M, part(F, x)] = maximum(%product, -1.0)
//   %h: bf16[M, part(F, x)] = minimum(%maximum, 1.0)
// }  # ends here: matmul uses %h
// kernel @fused_y(%landing: bf16[4, M/4, E], %x: bf16[M/4, E]) {
//   %scattered: bf16[M/4, E] = sum(%landing, axis=(0,))
//   %add: bf16[M/4, E] = add(%x, %scattered)
//   %maximum_2: bf16[M/4, E] = maximum(%add, -1.0)
//   %y: bf16[M/4, E] = minimum(%maximum_2, 1.0)
// }
// block @layer(%x: bf16[M@x, E], %w_in: bf16[E, F@x], %w_out: bf16[F@x, E]) -> (%y: bf16[M@x, E]) {
//   %product = allocate bf16[M, part(F, x)]
//   fork ring
//   for %i in 0..4 {
//     %p = (rank.x + %i) % 4
//     stream ring[%i] {
//       %x_gathered = allocate bf16[M/4, E]
//       if %p != rank.x {
//         group {
//           recv %x_gathered from %p on x
//           send %x to (rank.x - %i) % 4 on x
//         }
//       }
//       %product_i = chunk %product[0: %p of 4]
//       %x_chunk = choose %x if %p == rank.x else %x_gathered
//       matmul %x_chunk, %w_in -> %product_i
//     }
//   }
//   join ring
//   %h = reshape %product to [M, part(F, x)]
//   launch @maximum_minimum_h %product -> %h
//   %landing = allocate bf16[4, M/4, E]
//   fork ring
//   for %j in 0..4 {
//     %q = (rank.x + 1 + %j) % 4
//     stream ring[%j] {
//       %h_j = chunk %h[0: %q of 4]
//       %product_2 = allocate bf16[M/4, E]
//       %p_2 = (rank.x - 1 - %j) % 4
//       %landing_j = select %landing[0: %p_2]
//       %product_2_chunk = choose %landing_j if %q == rank.x else %product_2
//       matmul %h_j, %w_out -> %product_2_chunk
//       if %q != rank.x {
//         group {
//           recv %landing_j from %p_2 on x
//           send %product_2 to %q on x
//         }
//       }
//     }
//   }
//   join ring
//   launch @fused_y %landing, %x -> %y
// }
// host @three_layers(%x: bf16[M, E], %w_in_0: bf16[E, F@x], %w_out_0: bf16[F@x, E], %w_in_1: bf16[E, F@x], %w_out_1: bf16[F@x,
// E], %w_in_2: bf16[E, F@x], %w_out_2: bf16[F@x, E]) -> (%y: bf16[M@x, E]) mesh(x=4) streams(ring[4]) uneven(F) {
//   %x_sliced = chunk %x[0: rank.x of 4]
//   %layer = allocate bf16[M/4, E]
//   call @layer %x_sliced, %w_in_0, %w_out_0 -> %layer
//   %layer_2 = allocate bf16[M/4, E]
//   call @layer %layer, %w_in_1, %w_out_1 -> %layer_2
//   deallocate %layer
//   call @layer %layer_2, %w_in_2, %w_out_2 -> %y
// }
#include "program.h"

#include "hostweave/check.h"
#include "hostweave/group.h"
#include "hostweave/shards.h"
#include "kernels.h"

namespace programs::three_layers {

Program::Program(hw::Rank& rank)
    : rank_(rank.expect_world(kWorld)),
      channel_x_(rank.channel(kMesh, "x", 4)),
      ring_(rank, "ring", 4),
      plan_product_(rank, CUDA_R_16BF, CUDA_R_16BF),
      plan_product_2_(rank, CUDA_R_16BF, CUDA_R_16BF) {
  HW_CHECK(hw::load(maximum_minimum_h));
  HW_CHECK(hw::load(fused_y));
}

Sizes Program::check(const Inputs& in) const {
  in.x.expect("x", "bf16[M, E]", CUDA_R_16BF, {hw::kAny, hw::kAny}, rank_.device());
  const int64_t M = in.x.dim(0);
  hw::expect_divisible("M", M, 4);
  const int64_t E = in.x.dim(1);
  in.w_in_0.expect("w_in_0", "bf16[E, part(F, x)]", CUDA_R_16BF, {E, hw::kAny}, rank_.device());
  const int64_t F = in.w_in_0.whole_dim(1, 4);
  const int64_t F_x = hw::local_size(F, 4, rank_.index());
  in.w_in_0.expect("w_in_0", "bf16[E, part(F, x)]", CUDA_R_16BF, {E, F_x}, rank_.device());
  in.w_out_0.expect("w_out_0", "bf16[part(F, x), E]", CUDA_R_16BF, {F_x, E}, rank_.device());
  in.w_in_1.expect("w_in_1", "bf16[E, part(F, x)]", CUDA_R_16BF, {E, F_x}, rank_.device());
  in.w_out_1.expect("w_out_1", "bf16[part(F, x), E]", CUDA_R_16BF, {F_x, E}, rank_.device());
  in.w_in_2.expect("w_in_2", "bf16[E, part(F, x)]", CUDA_R_16BF, {E, F_x}, rank_.device());
  in.w_out_2.expect("w_out_2", "bf16[part(F, x), E]", CUDA_R_16BF, {F_x, E}, rank_.device());
  return {M, E, F, F_x};
}

OutputShapes Program::output_shapes(const Inputs& in) const {
  const auto [M, E, F, F_x] = check(in);
  return {.y = {M / 4, E}};
}

void Program::prepare(const Inputs& in) {
  const Sizes sizes = check(in);
  if (prepared_ == sizes) return;
  const auto [M, E, F, F_x] = sizes;
  prepared_.reset();
  plan_product_.prepare({M / 4, E}, {E, F_x}, {M / 4, F_x});
  plan_product_2_.prepare({M / 4, F_x}, {F_x, E}, {M / 4, E});
  hw::MemoryPlan memory;
  memory.allocate(layer_, M / 4 * E);
  layer_memory(sizes, memory);
  memory.allocate(layer_2_, M / 4 * E);
  layer_memory(sizes, memory);
  memory.free(layer_);
  layer_memory(sizes, memory);
  arena_.reserve(memory);
  prepared_ = sizes;
}

void Program::run(const Inputs& in, const Outputs& out, cudaStream_t caller) {
  const Sizes sizes = check(in);
  hw::expect_prepared(prepared_ == sizes);
  const auto [M, E, F, F_x] = sizes;
  out.y.expect("y", "bf16[M/4, E]", CUDA_R_16BF, {M / 4, E}, rank_.device());

  const auto* x = in.x.as<hw::bf16>();
  const auto* w_in_0 = in.w_in_0.as<hw::bf16>();
  const auto* w_out_0 = in.w_out_0.as<hw::bf16>();
  const auto* w_in_1 = in.w_in_1.as<hw::bf16>();
  const auto* w_out_1 = in.w_out_1.as<hw::bf16>();
  const auto* w_in_2 = in.w_in_2.as<hw::bf16>();
  const auto* w_out_2 = in.w_out_2.as<hw::bf16>();
  auto* y = out.y.as<hw::bf16>();
  const int64_t rank_x = rank_.index();

  HW_CHECK(arena_.begin_call(caller));
  const auto* x_sliced = x + rank_x * (M / 4 * E);
  layer(x_sliced, w_in_0, w_out_0, layer_, caller);
  layer(layer_, w_in_1, w_out_1, layer_2_, caller);
  layer(layer_2_, w_in_2, w_out_2, y, caller);
  HW_CHECK(arena_.end_call(caller));
}

// (x: bf16[M@x, E], w_in: bf16[E, F@x], w_out: bf16[F@x, E]) -> (y: bf16[M@x, E])
void Program::layer(const hw::bf16* x, const hw::bf16* w_in, const hw::bf16* w_out, hw::bf16* y, cudaStream_t caller) {
  const auto [M, E, F, F_x] = *prepared_;
  const int64_t rank_x = rank_.index();

  HW_CHECK(ring_.fork(caller));
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t p = (rank_x + i) % 4;
    const hw::Stream stream = ring_[i];
    auto* x_gathered = layer_x_gathered_[i];
    if (p != rank_x) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(x_gathered, M / 4 * E, ncclBfloat16, p, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(x, M / 4 * E, ncclBfloat16, (rank_x - i + 4) % 4, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
    auto* product_i = layer_product_ + p * (M / 4 * F_x);
    const auto* x_chunk = p == rank_x ? x : x_gathered;
    HW_CHECK(plan_product_.multiply(x_chunk, w_in, product_i, stream));
  }
  HW_CHECK(ring_.join(caller));
  HW_CHECK(hw::launch_pdl(maximum_minimum_h, hw::grid_of_elements<8>(M * F_x), caller, hw::reads(layer_product_, M * F_x),
                          hw::writes(layer_product_, M * F_x), M, F_x));
  HW_CHECK(ring_.fork(caller));
  for (int64_t j = 0; j < 4; ++j) {
    const int64_t q = (rank_x + 1 + j) % 4;
    const hw::Stream stream = ring_[j];
    auto* h_j = layer_product_ + q * (M / 4 * F_x);
    auto* product_2 = layer_product_2_[j];
    const int64_t p_2 = (rank_x - 1 - j + 4) % 4;
    auto* landing_j = layer_landing_ + p_2 * (M / 4 * E);
    auto* product_2_chunk = q == rank_x ? landing_j : product_2;
    HW_CHECK(plan_product_2_.multiply(h_j, w_out, product_2_chunk, stream));
    if (q != rank_x) {
      HW_CHECK(ncclGroupStart());
      const hw::CloseGroupOnError guard;
      HW_CHECK(ncclRecv(landing_j, M / 4 * E, ncclBfloat16, p_2, channel_x_.comm(), stream));
      HW_CHECK(ncclSend(product_2, M / 4 * E, ncclBfloat16, q, channel_x_.comm(), stream));
      HW_CHECK(ncclGroupEnd());
    }
  }
  HW_CHECK(ring_.join(caller));
  HW_CHECK(hw::launch_pdl(fused_y, hw::grid_of_elements<8>(M / 4 * E), caller, hw::reads(layer_landing_, M * E),
                          hw::reads(x, M / 4 * E), hw::writes(y, M / 4 * E), M, E));
}

void Program::layer_memory(const Sizes& sizes, hw::MemoryPlan& memory) {
  const auto [M, E, F, F_x] = sizes;
  memory.allocate(layer_product_, M * F_x);
  memory.allocate(layer_x_gathered_, M / 4 * E, ring_);
  memory.join(ring_);
  memory.allocate(layer_landing_, M * E);
  memory.allocate(layer_product_2_, M / 4 * E, ring_);
  memory.join(ring_);
  memory.free(layer_product_);
  memory.free(layer_landing_);
}

}  // namespace programs::three_layers
