// Tiles of grouped matmuls. A block may process several tiles of the result. The bounds of the groups are in device memory.
// GroupWalk finds the group of a tile by a prefix sum over the numbers of tiles per group.
#pragma once
#include "hostweave/grouped_problem.h"
#include "hostweave/grouped_tiles.h"

namespace hw {

#ifdef __CUDACC__

// Rows of a group, limited to the rows of this rank.
struct GroupRows {
  int64_t begin, end;

  __device__ int64_t count() const { return end > begin ? end - begin : 0; }
};

__device__ inline GroupRows rows_of(const GroupedProblem& p, int64_t group) {
  return {limited(p.starts[group] - p.first, p.rows), limited(p.ends[group] - p.first, p.rows)};
}

// Number of the tile that this block processes in round `round`. Odd rounds assign tiles in reverse order, to balance the load.
__device__ inline int tile_of_block(int round) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

// A tile of the result. `row` is the first row of the tile, and `column` is the index of the tile in its row of tiles.
struct GroupTile {
  int64_t group, row, column;
  GroupRows rows;
};

// Row and column of tile number `position`. The rows of tiles are divided into bands of about equal height, with at most 16 rows
// of tiles each. Tiles of a band are numbered column by column, so that concurrent tiles share operands. There are as few bands
// as possible, because each band reads all columns again.
__device__ inline void set_position(int position, int down, int across, int& row, int& column) {
  const int bands = (down + 15) / 16, height = (down + bands - 1) / bands, first = position / (height * across) * height;
  const int rows = down - first < height ? down - first : height, in_band = position - first * across;
  column = in_band / rows, row = first + in_band - column * rows;
}

// Finds tiles of the result by number. Call `find` with increasing numbers, on all threads of a warp. Numbers are below 2^31,
// because larger results do not fit in memory. If each thread block processes few tiles, tiles with at most half of their rows
// have the highest numbers, to balance the load.
class GroupWalk {
 public:
  __device__ GroupWalk(const GroupedProblem& p, int tile_rows, int tile_columns)
      : p_(p), tile_rows_(tile_rows), across_(static_cast<int>((p.columns + tile_columns - 1) / tile_columns)) {
    small_last_ = ((p.rows + tile_rows - 1) / tile_rows + p.groups) * across_ < int64_t{20} * gridDim.x;
    scan();
  }

  __device__ bool find(int tile, GroupTile& found) {
    while (tile - before_ >= total_ * across_) {
      before_ += total_ * across_, base_ += 32;
      if (base_ >= p_.groups) {
        if (!small_last_ || is_small_) return false;
        base_ = 0, is_small_ = true;
      }
      scan();
    }
    const int position = tile - before_;
    const int lane = __ffs(__ballot_sync(~0u, position < sums_ * across_)) - 1;
    const int own = __shfl_sync(~0u, tiles_, lane), in_group = position - __shfl_sync(~0u, sums_ - tiles_, lane) * across_;
    found.rows = {__shfl_sync(~0u, lane_rows_.begin, lane), __shfl_sync(~0u, lane_rows_.end, lane)};
    int row, column;
    set_position(in_group, own, across_, row, column);
    if (is_small_) row = static_cast<int>(found.rows.count() / tile_rows_);
    found.group = base_ + lane, found.row = found.rows.begin + int64_t{row} * tile_rows_, found.column = column;
    return true;
  }

 private:
  __device__ void scan() {
    const int lane = threadIdx.x % 32;
    lane_rows_ = base_ + lane < p_.groups ? rows_of(p_, base_ + lane) : GroupRows{0, 0};
    const int64_t rows = lane_rows_.count() + tile_rows_ - 1;
    const int all = static_cast<int>(rows / tile_rows_), large = static_cast<int>((rows - tile_rows_ / 2) / tile_rows_);
    sums_ = tiles_ = is_small_ ? all - large : small_last_ ? large : all;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sums_, distance);
      if (lane >= distance) sums_ += other;
    }
    total_ = __shfl_sync(~0u, sums_, 31);
  }

  const GroupedProblem& p_;
  int tile_rows_, across_, base_ = 0, before_ = 0, tiles_ = 0, sums_ = 0, total_ = 0;
  bool small_last_ = false, is_small_ = false;
  GroupRows lane_rows_{};
};

// Finds tiles by number for products that sum over the rows of a group. The result of each group is [depth, columns].
struct OuterWalk {
  const GroupedProblem& p;
  int tile_rows, down, across;

  __device__ OuterWalk(const GroupedProblem& p, int tile_rows, int tile_columns)
      : p(p),
        tile_rows(tile_rows),
        down(static_cast<int>((p.depth + tile_rows - 1) / tile_rows)),
        across(static_cast<int>((p.columns + tile_columns - 1) / tile_columns)) {}

  __device__ bool find(int tile, GroupTile& found) const {
    const int group = tile / (down * across);
    if (group >= p.groups) return false;
    int row, column;
    set_position(tile - group * down * across, down, across, row, column);
    found = {group, int64_t{row} * tile_rows, column, rows_of(p, group)};
    return true;
  }
};

// Writes zeros to the rows before the first group, between groups, and after the last group. `threads` threads of each block call
// this function; these threads form whole warps.
template <class T>
__device__ void fill_between_groups(const GroupedProblem& p, int thread, int threads) {
  auto* const result = static_cast<uint16_t*>(p.result);
  const int64_t each = (p.wide_result ? sizeof(float) : sizeof(T)) / sizeof(uint16_t);
  int64_t last = 0;  // largest end of the previous groups
  for (int64_t base = 0; base <= p.groups; base += 32) {
    const int64_t e = base + threadIdx.x % 32;
    const GroupRows own = e < p.groups ? rows_of(p, e) : GroupRows{p.rows, p.rows};
    // The gap before an empty group ends at a later group.
    const int64_t begin = e < p.groups && own.count() == 0 ? -1 : own.begin;
    int64_t end = begin < 0 ? 0 : own.end;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(~0u, end, distance);
      if (threadIdx.x % 32 >= distance && other > end) end = other;
    }
    int64_t before = __shfl_up_sync(~0u, end, 1);
    if (threadIdx.x % 32 == 0 || before < last) before = last;
    for (unsigned gaps = __ballot_sync(~0u, begin > before); gaps; gaps &= gaps - 1) {
      const int lane = __ffs(gaps) - 1;
      const int64_t from = __shfl_sync(~0u, before, lane), to = __shfl_sync(~0u, begin, lane);
      for (int64_t row = from + blockIdx.x; row < to; row += gridDim.x) {
        for (int64_t i = thread; i < p.columns * each; i += threads) result[row * p.result_pitch * each + i] = 0;
      }
    }
    const int64_t end_of_all = __shfl_sync(~0u, end, 31);
    if (end_of_all > last) last = end_of_all;
  }
}

#endif

}  // namespace hw
