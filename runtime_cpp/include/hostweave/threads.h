// Threads of a block, which kernels and their launches have to agree on.
#pragma once

namespace hw {

constexpr int kThreads = 256;     // for elements that nothing joins
constexpr int kRowThreads = 512;  // at most, for a row that they reduce together
constexpr int kRowAccesses = 4;   // at most, of such a thread, where rows are not longer than it can hold
constexpr int kLaneParts = 32;    // threads that share a lane of which each has elements of its own
constexpr int kTile = 32;         // columns that they reduce together
constexpr int kSorted = 2048;     // numbers that a block orders in its own memory

constexpr int kFewRows = 8;           // at most, of a product that takes as long as to read its weights
constexpr int kProducts = 4;          // at most, of one operand, which one kernel computes
constexpr int kProductColumns = 64;   // of a block
constexpr int kProductThreads = 256;  // of a block, two of which a multiprocessor holds
constexpr int kLargeProductThreads = 2 * kProductThreads;

}  // namespace hw
