// Products of tiles by warpgroups of Hopper. Both operands come from shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions": layouts and descriptors). Other GPUs have no such instructions, and have TileProduct
// instead.
#pragma once
#include "hostweave/grouped_tiles.h"

namespace hw {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Panels of an operand, loaded stage by stage: kPanels side by side, each kRows rows of 64 elements of 16 bits. The operand is
// read along its rows, or down its columns if kDown. Chunks of 8 elements are permuted: the 128-byte swizzle.
template <class T, int kRows, int kPanels, bool kDown>
struct Panels {
  static constexpr int kRowBytes = 128, kPanelBytes = kRows * kRowBytes, kEach = kGroupedThreads / 8;

  const T* source;  // of this thread
  int64_t pitch;
  int rows, columns;  // that exist, from this thread's row and chunk

  __device__ void start(const Operand<T>& operand, int64_t depth) {
    constexpr int64_t kMost = 1 << 30;
    const int row = threadIdx.x / 8, place = threadIdx.x % 8 * 8;
    source = operand.at + row * operand.pitch + place, pitch = operand.pitch;
    rows = static_cast<int>(limited(kDown ? depth : operand.count, kMost)) - row;
    columns = static_cast<int>(limited(kDown ? operand.count : depth, kMost)) - place;
  }

  // Starts to copy a stage: what exists of it. The rest is zeros.
  __device__ void copy(unsigned to) {
    const int row = threadIdx.x / 8, place = threadIdx.x % 8;
    const unsigned target = to + row * kRowBytes + (place ^ row % 8) * 16;
    if (rows > kRows - kEach && columns >= (kPanels - 1) * 64 + 8) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int down = 0; down < kRows; down += kEach) {
          copy_chunk(target + panel * kPanelBytes + down * kRowBytes, source + panel * 64 + down * pitch, 16);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPanels * (kRows / kEach); ++i) {
        const int panel = i % kPanels, down = i / kPanels * kEach;
        const int left = down < rows ? columns - panel * 64 : 0;
        copy_chunk(target + panel * kPanelBytes + down * kRowBytes, source + panel * 64 + down * pitch,
                   2 * static_cast<int>(limited(left, 8)));
      }
    }
    source += kDown ? 64 * pitch : 64;
    (kDown ? rows : columns) -= 64;
  }

  // The first `bytes` of 16.
  __device__ static void copy_chunk(unsigned to, const T* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }

  // Descriptor of a matrix in a stage, for wgmma: start, distance of panels, distance of eight rows, 128-byte swizzle.
  __device__ static uint64_t matrix(unsigned at) {
    return (at & 0x3FFFF) >> 4 | uint64_t{kPanelBytes >> 4} << 16 | uint64_t{8 * kRowBytes >> 4} << 32 | uint64_t{1} << 62;
  }
};

// sums[64, 256] += a[64, 16] b[16, 256], begun by a warpgroup. is_first: the sums were undefined.
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

// One tile of a product of 16-bit floats by two warpgroups, 64 rows each: a [kRows, depth] times b [depth, kColumns]. If
// kTurnedA, a is stored column by column; if kTurnedB, b is. Two stages of kDepth terms are copied while two are multiplied.
template <class T, bool kTurnedA, bool kTurnedB>
struct WarpgroupProduct {
  static constexpr int kRows = kWarpgroupRows, kColumns = kWarpgroupColumns, kDepth = 64, kStages = 4, kAhead = kStages - 2;
  static constexpr int kBytesA = kRows * kDepth * 2, kBytes = kBytesA + kColumns * kDepth * 2;
  static_assert(kStages * kBytes + 1024 == kWarpgroupShared && kRows * kColumns * 2 <= (kStages - kAhead) * kBytes);

  unsigned stages;
  Panels<T, kTurnedA ? kDepth : kRows, kTurnedA ? kRows / 64 : 1, kTurnedA> a;
  Panels<T, kTurnedB ? kColumns : kDepth, kTurnedB ? 1 : kColumns / 64, !kTurnedB> b;
  float sums[kColumns / 8][4];

  // All operands allow 16-byte reads.
  __device__ WarpgroupProduct(T* shared, bool)
      : stages((static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u) {}

  __device__ unsigned stage(int64_t step) const { return stages + static_cast<int>(step % kStages) * kBytes; }

  __device__ void copy(int64_t step, int64_t steps) {
    if (step < steps) a.copy(stage(step)), b.copy(stage(step) + kBytesA);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ static int64_t steps_of(const Tile<T>& tile) { return (tile.depth + kDepth - 1) / kDepth; }

  // Starts to copy a tile. No thread reads an earlier one.
  __device__ void start(const Tile<T>& tile) {
    a.start(tile.a, tile.depth), b.start(tile.b, tile.depth);
    for (int i = 0; i < kAhead; ++i) copy(i, steps_of(tile));
  }

  __device__ void multiply(const Tile<T>& tile) {
    const int64_t steps = steps_of(tile);
    if (steps == 0) {
#pragma unroll
      for (auto& each : sums) each[0] = each[1] = each[2] = each[3] = 0;
    }
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what cp.async wrote is visible to wgmma
      __syncthreads();                                              // and all warpgroups have multiplied step - 2
      const uint64_t of_a = a.matrix(stage(step) + threadIdx.x / 128 * (kBytesA / 2)), of_b = b.matrix(stage(step) + kBytesA);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        begin_product<kTurnedA, kTurnedB>(sums, of_a + k * (kTurnedA ? 128 : 2) / 16, of_b + k * (kTurnedB ? 2 : 128) / 16,
                                          step == 0 && k == 0, T());
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      copy(step + kAhead, steps);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }

  // Stores the part of the tile that exists. It is turned in the stages that no copy of the next tile has reached yet, so that
  // the block stores whole rows one after another.
  template <class Result>
  __device__ void store(Result* to, int64_t pitch, int64_t rows, int64_t columns) const {
    constexpr int kPart = kColumns * 2 / sizeof(Result), kChunks = kColumns * 2 / 16, kEach = 16 / sizeof(Result);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto chunk = [&](int row, int place) { return stage(kAhead) + row * (kChunks * 16) + (place ^ row % 8) * 16; };
#pragma unroll
    for (int part = 0; part < kColumns; part += kPart) {
      if (part > 0) __syncthreads();
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&sum)[4] = sums[part / 8 + j];
          const Values<Result, 2> pair{{Result(sum[half * 2]), Result(sum[half * 2 + 1])}};
          const int byte = (j * 8 + lane % 4 * 2) * sizeof(Result);
          *shared_at<Values<Result, 2>>(chunk(warp * 16 + half * 8 + lane / 4, byte / 16) + byte % 16) = pair;
        }
      }
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < kRows * kChunks; i += kGroupedThreads) {
        const int row = i / kChunks, column = i % kChunks * kEach;
        const int64_t left = row < rows ? columns - part - column : 0;
        const auto values = *shared_at<Values<Result, kEach>>(chunk(row, i % kChunks));
        Result* const at = to + row * pitch + part + column;
        if (left >= kEach) {
          hw::store(at, values);
        } else {
#pragma unroll
          for (int k = 0; k < kEach; ++k) {
            if (k < left) at[k] = values[k];
          }
        }
      }
    }
  }

  template <class Values>
  __device__ static Values* shared_at(unsigned at) {
    return static_cast<Values*>(__cvta_shared_to_generic(at));
  }
};

#elif defined(__CUDACC__)

// In the same dynamic shared memory.
template <class T, bool kTurnedA, bool kTurnedB>
using WarpgroupProduct = TileProduct<T, kWarpgroupRows, 64, kTurnedA, kTurnedB>;

#endif

}  // namespace hw
