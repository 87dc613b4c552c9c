// Transposition of a kernel's result, by tiles: threads read along rows, and write along columns.
#pragma once
#include "hostweave/kernel.h"

namespace hw {

#ifdef __CUDACC__

// Writes column j of the result to `to + j * pitch`. `compute(i, j)` returns elements j to j + kWidth - 1 of row i, as T or as
// the type of the computation. All threads of the grid must call this function, in blocks of kThreads.
template <int kWidth = 1, class T, class Compute>
__device__ void transpose(int64_t rows, int64_t columns, T* to, int64_t pitch, Compute compute) {
  using Word = Chosen<(sizeof(T) < 4), uint32_t, T>;
  constexpr int kPadding = sizeof(Word) / sizeof(T);                   // Consecutive columns begin in different banks.
  constexpr int kStored = 16 / sizeof(T), kWords = 16 / sizeof(Word);  // elements and words per store
  constexpr int kRows = kTileRows<sizeof(T)>, kElements = kRows * kTransposed;
  constexpr int kUnrolled = kWidth > 1 ? kElements : 1;
  __shared__ alignas(16) T tile[kTransposed][kRows + kPadding];
  const bool is_wide = pitch % kStored == 0 && aligned(to);
  // The number of a tile fits in 32 bits. Division of 32-bit integers is faster.
  const auto across = static_cast<uint32_t>((columns + kTransposed - 1) / kTransposed);
  const int64_t down = (rows + kRows - 1) / kRows;
  for (int64_t number : over_blocks(down * across)) {
    const int64_t i = int64_t{static_cast<uint32_t>(number) / across} * kRows;
    const int64_t j = int64_t{static_cast<uint32_t>(number) % across} * kTransposed;
    const int64_t height = rows - i, length = columns - j;  // numbers of rows and columns from this tile to the end
    const auto fill = [&](auto is_inside) {
#pragma unroll kUnrolled
      for (int at = 0; at < kElements; at += kThreads * kWidth) {
        const int row = (at + threadIdx.x * kWidth) / kTransposed, column = threadIdx.x * kWidth % kTransposed;
        if (is_inside(row, column)) {
          const Values<T, kWidth> values = converted<T>(compute(i + row, j + column));
#pragma unroll
          for (int e = 0; e < kWidth; ++e) tile[column + e][row] = values[e];
        }
      }
    };
    if (height >= kRows && length >= kTransposed) {
      fill([](int, int) { return true; });  // Without conditions, the unrolled loads are in flight together.
    } else {
      fill([&](int row, int column) { return row < height && column < length; });
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < kElements; at += kThreads * kStored) {
      const int column = (at + threadIdx.x * kStored) / kRows, row = threadIdx.x * kStored % kRows;
      T* const first = to + (j + column) * pitch + i + row;
      if (column < length && is_wide && row + kStored <= height) {
        Values<Word, kWords> words;
        for (int e = 0; e < kWords; ++e) words[e] = reinterpret_cast<const Word*>(&tile[column][row])[e];
        store(reinterpret_cast<Word*>(first), words);
      } else if (column < length) {
        for (int e = 0; e < kStored && row + e < height; ++e) first[e] = tile[column][row + e];
      }
    }
    __syncthreads();  // All threads have read the tile, so the next tile may overwrite it.
  }
}

#else

template <int kWidth = 1, class T, class Compute>
void transpose(int64_t rows, int64_t columns, T* to, int64_t pitch, Compute compute) {
  for (int64_t begin = 0; begin < rows; begin += kTransposed) {
    for (int64_t j = 0; j < columns; j += kWidth) {
      for (int64_t i = begin; i < rows && i < begin + kTransposed; ++i) {
        const Values<T, kWidth> values = converted<T>(compute(i, j));
        for (int e = 0; e < kWidth; ++e) to[(j + e) * pitch + i] = values[e];
      }
    }
  }
}

#endif

}  // namespace hw
