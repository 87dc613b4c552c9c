// Launch parameters that kernels and their launches must agree on.
#pragma once

namespace hw {

constexpr int kThreads = 256;     // threads per block for pointwise kernels
constexpr int kRowThreads = 512;  // maximum threads per block that reduce a row
constexpr int kRowAccesses = 4;   // maximum accesses per thread to a row in registers
constexpr int kTransposed = 64;   // columns of a tile that a block transposes
template <int kBytes>             // rows of such a tile; its columns then have at least 128 bytes
constexpr int kTileRows = kBytes == 1 ? 2 * kTransposed : kTransposed;
constexpr int kTransposing = 8;  // minimum blocks per multiprocessor; while one transposing block waits, others load and store
constexpr int kFiberParts = 32;  // threads that share a fiber; each element belongs to one thread
constexpr int kTile = 32;        // columns per tile of a column reduction
constexpr int kSorted = 2048;    // maximum elements that a block sorts in shared memory

constexpr int kFewRows = 8;           // maximum rows of a matmul that the few-rows kernels compute
constexpr int kFewScaledRows = 16;    // the same for a matmul of 8-bit floats with scales
constexpr int kProductColumns = 64;   // columns per cluster
constexpr int kProductThreads = 256;  // threads per block
constexpr int kLargeProductThreads = 2 * kProductThreads;

}  // namespace hw
