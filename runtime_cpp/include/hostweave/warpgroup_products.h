// Grouped matmuls on Hopper. One warp of a block uses the tensor memory accelerator to copy tiles of the operands to shared
// memory. Two warpgroups use wgmma to multiply the tiles. For layouts and descriptors see PTX ISA, "Asynchronous Warpgroup Level
// Matrix Multiply-Accumulate Instructions". Other GPUs never launch these kernels.
#pragma once
#include "hostweave/group_walk.h"

namespace hw {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Begins d[64, 256] += a[64, 16] b[16, 256] on a warpgroup. If is_first, the instruction ignores the old d.
#define HW_BEGIN_PRODUCT(T, dtype)                                                                                             \
  template <bool kTurnedA, bool kTurnedB>                                                                                      \
  __device__ void begin_product(float (&d)[32][4], uint64_t a, uint64_t b, bool is_first, T) {                                 \
    asm volatile(                                                                                                              \
        "{ .reg .pred more; setp.eq.b32 more, %130, 0;"                                                                        \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." dtype "." dtype                                                         \
        " {"                                                                                                                   \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                               \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                     \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                     \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                     \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                     \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                     \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                         \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                       \
        "}, %128, %129, more, 1, 1, %131, %132; }"                                                                             \
        : HW_SUMS(d, 0), HW_SUMS(d, 2), HW_SUMS(d, 4), HW_SUMS(d, 6), HW_SUMS(d, 8), HW_SUMS(d, 10), HW_SUMS(d, 12),           \
          HW_SUMS(d, 14), HW_SUMS(d, 16), HW_SUMS(d, 18), HW_SUMS(d, 20), HW_SUMS(d, 22), HW_SUMS(d, 24), HW_SUMS(d, 26),      \
          HW_SUMS(d, 28), HW_SUMS(d, 30)                                                                                       \
        : "l"(a), "l"(b), "r"(static_cast<int>(is_first)), "n"(static_cast<int>(kTurnedA)), "n"(static_cast<int>(!kTurnedB))); \
  }
#define HW_SUMS(d, j)                                                                                                  \
  "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3]), "+f"(d[j + 1][0]), "+f"(d[j + 1][1]), "+f"(d[j + 1][2]), \
      "+f"(d[j + 1][3])
HW_BEGIN_PRODUCT(bf16, "bf16")
HW_BEGIN_PRODUCT(f16, "f16")
#undef HW_SUMS
#undef HW_BEGIN_PRODUCT

// An mbarrier in shared memory. The parities of its phases are 0, 1, 0, ...
struct PhaseBarrier {
  unsigned at;

  __device__ void start(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
  }
  // Arrives at the barrier. The phase ends only after `bytes` more bytes have been copied.
  __device__ void expect(int bytes) const {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes)
                 : "memory");
  }
  __device__ void wait(int parity) const {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ended;\n"
        "bra again;\n"
        "ended: }" ::"r"(at),
        "r"(parity)
        : "memory");
  }
};

// Counts uses of the stages in shared memory. A block uses the stages cyclically. `parity` is the phase parity of the stage's
// barriers.
template <int kStages>
struct StageCount {
  unsigned count = 0;

  __device__ int stage() const { return count % kStages; }
  __device__ int parity() const { return count / kStages % 2; }
  __device__ void advance() { ++count; }
};

// Number of this warpgroup. The shuffle tells the compiler that all threads of a warp have the same number. Without the shuffle,
// the compiler inserts a wait after each product.
__device__ inline int warpgroup_of_block() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// Waits at hardware barrier `number` until `threads` threads of the block have arrived.
__device__ inline void sync_warps(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Sets the number of registers of each thread, in code that NVRTC compiles. The assembler of nvcc 13.0 crashes on this
// instruction without optimisation.
template <int kCount, bool kMore>
__device__ void set_registers() {
#ifdef __CUDACC_RTC__
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
#endif
}

// Makes earlier ordinary writes to shared memory visible to wgmma and to tensor copies.
__device__ inline void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void copy_box(unsigned to, const TensorMap& map, int64_t i, int64_t j, int64_t k, PhaseBarrier filled) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(static_cast<int>(i)), "r"(static_cast<int>(j)), "r"(static_cast<int>(k)), "r"(filled.at)
      : "memory");
}

// Products of tiles of kRows x kColumns results, 64 rows per warpgroup.
template <class T, Operands kOperands>
class WarpgroupProducts {
  static constexpr bool kTransposed = kOperands == Operands::transposed_matrices, kFew = kOperands == Operands::few_rows;
  static constexpr bool kOuter = kFew || kOperands == Operands::rows;  // the products sum over the rows of a group
  static constexpr int kRows = kWarpgroupRows, kColumns = kWarpgroupColumns, kDepth = 64;
  static constexpr int kRowBytes = kDepth * 2, kBox = 64 * kRowBytes;  // bytes of a box of 64 x 64 elements
  static constexpr int kBytesA = kRows * kRowBytes, kBytes = kBytesA + kColumns * kRowBytes;
  static constexpr int kBoxRows = kFew ? kFewBoxRows : 64;  // rows per copy of x
  // Number of columns that a warpgroup stores at once. With kFew, these are all columns of the tile, because storing a tile takes
  // longer than multiplying the next tile.
  static constexpr int kStaged = kFew ? kColumns : 128;
  // Ids of hardware barriers: kAllBarrier is for both warpgroups that multiply, and kOwnBarrier + i is for one of them.
  static constexpr int kAllBarrier = 1, kOwnBarrier = 2;

 public:
  static constexpr int kStages = kFew ? kWarpgroupStages - 1 : kWarpgroupStages;

  __device__ WarpgroupProducts(const GroupedProblem& p, const GroupedMaps& maps, char* shared, uint64_t* barriers)
      : p_(p),
        maps_(maps),
        stages_((shared_address(shared) + 1023) & ~1023u),
        barriers_(shared_address(barriers)),
        warpgroup_(warpgroup_of_block() - 1) {
    static_assert(kStages * kBytes + kRows * kStaged * 2 + 1024 <= kWarpgroupShared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) filled(i).start(1), empty(i).start(kGroupedThreads / 32);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }

  // Copies the operands of all tiles of this block to the stages. One warp calls this function, and its first thread copies.
  __device__ void copy() {
    Walk walk(p_, kRows, kColumns);
    GroupTile tile;
    StageCount<kStages> at;
    for (int round = 0; walk.find(tile_of_block(round), tile); ++round) {
      if (threadIdx.x % 32 != 0) continue;
      const int64_t column = tile.column * kColumns, steps = steps_of(tile);
      const int64_t rows = kOuter ? p_.depth - tile.row : tile.rows.end - tile.row;
      const int boxes = rows > 64 ? 2 : 1;
      for (int64_t step = 0; step < steps; ++step, at.advance()) {
        const unsigned to = stages_ + at.stage() * kBytes;
        const PhaseBarrier ready = filled(at.stage());
        const int64_t left = tile.rows.count() - step * kDepth;
        const int parts = kFew ? static_cast<int>(limited(left + kBoxRows - 1, kDepth)) / kBoxRows : 1;
        empty(at.stage()).wait(at.parity() ^ 1);
        ready.expect((boxes + kColumns / 64) * parts * kBoxRows * kRowBytes);
        for (int part = 0; part < parts; ++part) {
          const unsigned a = to + part * kBoxRows * kRowBytes, b = a + kBytesA;
          const int64_t k = step * kDepth + part * kBoxRows + (kOuter ? tile.rows.begin : 0);
          for (int box = 0; box < boxes; ++box) {
            const int64_t row = tile.row + box * 64;
            copy_box(a + box * kBox, maps_.x, kOuter ? row : k, kOuter ? k : row, 0, ready);
          }
          if constexpr (kTransposed) {
            copy_box(b, maps_.other, k, column, tile.group, ready);
          } else {
#pragma unroll
            for (int box = 0; box < kColumns / 64; ++box) {
              copy_box(b + box * kBox, maps_.other, column + box * 64, k, kOuter ? 0 : tile.group, ready);
            }
          }
        }
      }
    }
  }

  // Two warpgroups multiply and store all tiles of this block.
  __device__ void multiply() {
    Walk walk(p_, kRows, kColumns);
    GroupTile tile, next;
    StageCount<kStages> at;
    bool exists = walk.find(tile_of_block(0), tile);
    for (int round = 1; exists; ++round, tile = next) {
      const int64_t rows = (kOuter ? p_.depth : tile.rows.end) - tile.row - warpgroup_ * 64;
      const int last = rows > 0 ? begin_stages(tile, at) : -1;
      if (rows <= 0) skip_stages(tile, at);
      exists = walk.find(tile_of_block(round), next);
      if (rows <= 0) continue;
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (last >= 0) release(last);
      if (p_.wide_result) {
        store_wide(tile, rows);
      } else {
        store(tile, rows);
      }
    }
    if (is_storing()) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if constexpr (!kOuter) fill_between_groups<T>(p_, thread(), kGroupedThreads);
  }

 private:
  using Walk = Chosen<kOuter, OuterWalk, GroupWalk>;

  const GroupedProblem& p_;
  const GroupedMaps& maps_;
  unsigned stages_, barriers_;
  int warpgroup_;  // number among the warpgroups that multiply
  float sums_[kColumns / 8][4];

  __device__ static int thread() { return threadIdx.x - 128; }  // number among the threads that multiply
  __device__ static bool is_storing() { return threadIdx.x % 128 == 0; }
  __device__ PhaseBarrier filled(int stage) const { return {barriers_ + stage * 8}; }
  __device__ PhaseBarrier empty(int stage) const { return {barriers_ + (kStages + stage) * 8}; }
  __device__ int64_t steps_of(const GroupTile& tile) const {
    return ((kOuter ? tile.rows.count() : p_.depth) + kDepth - 1) / kDepth;
  }

  // Marks a stage as read by this warp, so that the stage can be filled again.
  __device__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) empty(stage).arrive();
  }

  // Descriptor of a matrix for wgmma: start address, distance of panels of 64 columns, distance of groups of eight rows, 128-byte
  // swizzle.
  __device__ static uint64_t matrix(unsigned at) {
    return (at & 0x3FFFF) >> 4 | uint64_t{kBox >> 4} << 16 | uint64_t{8 * kRowBytes >> 4} << 32 | uint64_t{1} << 62;
  }

  // Begins the products of a tile. Returns the stage of the last product. If there are no products, returns -1 and sets the sums
  // to zero.
  __device__ int begin_stages(const GroupTile& tile, StageCount<kStages>& at) {
    const int steps = static_cast<int>(steps_of(tile));
    if (steps == 0) {
#pragma unroll
      for (auto& each : sums_) each[0] = each[1] = each[2] = each[3] = 0;
    }
    int before = -1;
    for (int step = 0; step < steps; ++step, at.advance()) {
      const unsigned stage = stages_ + at.stage() * kBytes;
      filled(at.stage()).wait(at.parity());
      if constexpr (kOuter) clear_rest(stage, tile.rows.count() - int64_t{step} * kDepth);
      const uint64_t a = matrix(stage + warpgroup_ * kBox), b = matrix(stage + kBytesA);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        begin_product<kOuter, kTransposed>(sums_, a + k * (kOuter ? kRowBytes : 2) / 16,
                                           b + k * (kTransposed ? 2 : kRowBytes) / 16, step == 0 && k == 0, T());
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (step > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(before);
      }
      before = at.stage();
    }
    return before;
  }

  // Waits for the stages of a tile, and releases the stages. Used if this warpgroup has no rows of the tile.
  __device__ void skip_stages(const GroupTile& tile, StageCount<kStages>& at) const {
    for (int64_t step = 0; step < steps_of(tile); ++step, at.advance()) {
      filled(at.stage()).wait(at.parity());
      if constexpr (kOuter) clear_rest(stages_ + at.stage() * kBytes, tile.rows.count() - step * kDepth);
      release(at.stage());
    }
  }

  // Sets the rows after the end of the group to zero in both operands. These rows are undefined or belong to another group.
  __device__ void clear_rest(unsigned stage, int64_t rows) const {
    if (rows >= kDepth) return;
    const int chunks = (kDepth - static_cast<int>(rows)) * 8;
    for (int i = thread(); i < chunks * (kBytes / kBox); i += kGroupedThreads) {
      const unsigned to = stage + i / chunks * kBox + static_cast<int>(rows) * kRowBytes + i % chunks * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_proxy();
    sync_warps(kAllBarrier, kGroupedThreads);
  }

  // Stores up to 64 of `rows` rows through shared memory. One thread copies boxes if kOuter or `rows` is at least 64.
  // Otherwise all threads of the warpgroup copy the rows.
  __device__ void store(const GroupTile& tile, int64_t rows) const {
    const int lane = threadIdx.x % 32, warp = thread() / 32 % 4, barrier = kOwnBarrier + warpgroup_;
    const unsigned staged = stages_ + kStages * kBytes + warpgroup_ * (64 * kStaged * 2);
    const int64_t row = tile.row + warpgroup_ * 64;
    const auto chunk = [&](int row, int position) {
      return staged + position / 8 * kBox + row * kRowBytes + (position % 8 ^ row % 8) * 16;
    };
#pragma unroll
    for (int part = 0; part < kColumns; part += kStaged) {
      const int64_t column = tile.column * kColumns + part;
      if (is_storing()) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      sync_warps(barrier, 128);
#pragma unroll
      for (int j = 0; j < kStaged / 8; j += 2) {
        const float (&left)[4] = sums_[part / 8 + j], (&right)[4] = sums_[part / 8 + j + 1];
        const unsigned at = chunk(warp * 16 + lane % 16, j + lane / 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(packed(left[0], left[1])),
                     "r"(packed(left[2], left[3])), "r"(packed(right[0], right[1])), "r"(packed(right[2], right[3]))
                     : "memory");
      }
      fence_proxy();
      sync_warps(barrier, 128);
      if (kOuter || rows >= 64) {
        if (!is_storing()) continue;
#pragma unroll
        for (int box = 0; box < kStaged / 64; ++box) {
          if (column + box * 64 >= p_.columns) continue;
          asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&maps_.result),
                       "r"(static_cast<int>(column) + box * 64), "r"(static_cast<int>(row)),
                       "r"(kOuter ? static_cast<int>(tile.group) : 0), "r"(staged + box * kBox)
                       : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      } else {
        T* const to = static_cast<T*>(p_.result) + row * p_.result_pitch + column;
        for (int i = threadIdx.x % 128; i < static_cast<int>(rows) * (kStaged / 8); i += 128) {
          const int down = i / (kStaged / 8), position = i % (kStaged / 8);
          const auto values = *static_cast<Values<T, 8>*>(__cvta_shared_to_generic(chunk(down, position)));
          store_chunk(to + down * p_.result_pitch + position * 8, values, p_.columns - column - position * 8);
        }
      }
    }
  }

  __device__ static void store_chunk(T* to, const Values<T, 8>& values, int64_t left) {
    if (left >= 8) {
      hw::store(to, values);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (k < left) to[k] = values[k];
      }
    }
  }

  __device__ static unsigned packed(float first, float second) {
    const Values<T, 2> pair{{T(first), T(second)}};
    return *reinterpret_cast<const unsigned*>(&pair);
  }

  // Stores f32 sums directly. Four adjacent threads store the 32 bytes of eight columns.
  __device__ void store_wide(const GroupTile& tile, int64_t rows) const {
    const int lane = threadIdx.x % 32, first = thread() / 32 % 4 * 16 + lane / 4;
    float* const to = static_cast<float*>(p_.result) + (kOuter ? tile.group * p_.result_stride : 0) +
                      (tile.row + warpgroup_ * 64) * p_.result_pitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + half * 8;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int64_t column = tile.column * kColumns + j * 8 + lane % 4 * 2, left = p_.columns - column;
        float* const at = to + row * p_.result_pitch + column;
        const Values<float, 2> pair{{sums_[j][half * 2], sums_[j][half * 2 + 1]}};
        if (left >= 2) {
          hw::store(at, pair);
        } else if (left > 0) {
          *at = pair[0];
        }
      }
    }
  }
};

#endif

#ifdef __CUDACC__

// The kernel: the first warp copies, and the second and third warpgroup multiply.
template <class T, Operands kOperands>
__device__ void multiply_groups_by_warpgroups(const GroupedProblem& p, const GroupedMaps& maps, char* shared) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Products = WarpgroupProducts<T, kOperands>;
  __shared__ uint64_t barriers[2 * Products::kStages];
  Products products(p, maps, shared, barriers);
  griddep_wait();
  if (warpgroup_of_block() == 0) {
    set_registers<40, false>();
    if (threadIdx.x < 32) products.copy();
  } else {
    set_registers<232, true>();
    products.multiply();
  }
#endif
}

#endif

}  // namespace hw
