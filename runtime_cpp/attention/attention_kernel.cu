// Attention by tiles of scores in f32, which are in registers and shared memory alone: a thread block has kAttentionTile rows of
// a head and walks their columns, correcting what it has when a larger score comes; for the gradients of keys and values it has
// columns, and walks rows. Sums are in one order, so that results do not change from run to run.
#include "hostweave/attention_kernel.h"
#include "hostweave/kernel.h"

namespace hw {
namespace {

constexpr int kSide = 16;                      // threads along a tile, in both dims
constexpr int kEach = kAttentionTile / kSide;  // rows of a thread, kSide apart, and columns
constexpr int kDepth = 32;                     // of products at once

__device__ inline float none() { return -INFINITY; }

using Scores = float[kEach][kEach];

struct Shared {
  float a[kDepth][kAttentionTile + 1], b[kDepth][kAttentionTile + 1];  // transposed, with a column for the banks
  float weights[kAttentionTile][kAttentionTile + 1];
  float sums[kAttentionTile];
};

template <class Memory>
__device__ int64_t at(const HeadsAt<Memory>& x, int64_t batch, int64_t head) {
  return batch * x.batch_stride + head * x.head_stride;
}

// Some rows of an operand.
template <class T>
struct Tile {
  const T* base;
  int64_t pitch, rows;
};

template <class T, class Memory>
__device__ Tile<T> tile(const HeadsAt<Memory>& x, int64_t batch, int64_t head, int64_t first, int64_t all) {
  return {static_cast<const T*>(x.base) + at(x, batch, head) + first * x.row_stride, x.row_stride,
          min(int64_t{kAttentionTile}, all - first)};
}

// The columns from one to the one before another.
struct Span {
  int64_t begin, end;

  __device__ bool has(int64_t column) const { return column >= begin && column < end; }
};

// The columns that rows of one of the batch see: neither where they begin nor where they end decreases with the row.
struct Sight {
  int64_t rows, length, diagonal, window, sequences;
  bool causal;
  const int32_t* offsets;

  __device__ Sight(const AttentionKernel& p, int64_t batch)
      : rows(p.rows),
        length(p.lengths ? max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.columns)) : p.columns),
        diagonal(p.diagonal + (p.from_end ? length : 0)),
        window(p.window),
        sequences(p.sequences),
        causal(p.causal),
        offsets(p.offsets ? p.offsets + batch * (p.sequences + 1) : nullptr) {}

  // The sequence that a token is of; before the first one, and behind the last, what it sees is empty.
  __device__ Span sequence(int64_t token) const {
    int64_t low = 0, high = sequences + 1;  // how many offsets are not behind it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      offsets[middle] <= token ? low = middle + 1 : high = middle;
    }
    return {offsets[max(low - 1, int64_t{0})], offsets[min(low, sequences)]};
  }
  __device__ Span of(int64_t row) const {
    if (row >= rows) return {0, 0};
    const int64_t begin = window ? max(int64_t{0}, row + diagonal + 1 - window) : 0;
    const int64_t end = causal ? max(int64_t{0}, min(row + diagonal + 1, length)) : length;
    if (!offsets) return {begin, end};
    const Span own = sequence(row);
    return {max(begin, own.begin), min(end, own.end)};
  }
  // The rows that see some of these columns are among them.
  __device__ Span rows_of(int64_t first, int64_t last) const {
    const int64_t begin = causal ? max(int64_t{0}, first - diagonal) : 0;
    const int64_t end = window ? min(rows, last - diagonal + window) : rows;
    if (!offsets) return {begin, end};
    return {max(begin, sequence(first).begin), min(end, sequence(last).end)};
  }
};

// What is added to the scores of a head.
template <class T>
struct Bias {
  const T* base;
  int64_t row_stride;

  __device__ Bias(const AttentionKernel& p, int64_t batch, int64_t head)
      : base(p.bias.base ? static_cast<const T*>(p.bias.base) + at(p.bias, batch, head) : nullptr),
        row_stride(p.bias.row_stride) {}
  __device__ float operator()(int64_t row, int64_t column) const {
    return base ? static_cast<float>(base[row * row_stride + column]) : 0;
  }
};

__device__ inline int across() { return threadIdx.x % kSide; }
__device__ inline int down() { return threadIdx.x / kSide; }

// Of the kSide threads that share a row.
template <class Combine>
__device__ float reduced(float x, Combine combine) {
#pragma unroll
  for (int lanes = kSide / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
  return x;
}

// The products of rows of a and rows of b.
template <class T>
__device__ void multiply(Scores& scores, const Tile<T>& a, const Tile<T>& b, int64_t depth, Shared& shared) {
#pragma unroll
  for (auto& row : scores) {
#pragma unroll
    for (float& score : row) score = 0;
  }
  for (int64_t first = 0; first < depth; first += kDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kAttentionTile * kDepth; i += kAttentionThreads) {
      const int row = i / kDepth, d = i % kDepth;
      const bool is_term = first + d < depth;
      shared.a[d][row] = is_term && row < a.rows ? static_cast<float>(a.base[row * a.pitch + first + d]) : 0;
      shared.b[d][row] = is_term && row < b.rows ? static_cast<float>(b.base[row * b.pitch + first + d]) : 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
      float left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        left[i] = shared.a[d][down() + kSide * i], right[i] = shared.b[d][across() + kSide * i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) scores[i][j] += left[i] * right[j];
      }
    }
  }
}

// The sums of rows of x by the weights in shared memory.
template <int kColumns, class T>
__device__ void add_weighted(float (&sums)[kEach][kColumns], const Shared& shared, const Tile<T>& x, int64_t size) {
  for (int term = 0; term < x.rows; ++term) {
    float weights[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) weights[i] = shared.weights[down() + kSide * i][term];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = across() + kSide * j;
      const float value = column < size ? static_cast<float>(x.base[term * x.pitch + column]) : 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i][j] += weights[i] * value;
    }
  }
}

__device__ inline void keep(Shared& shared, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) shared.weights[down() + kSide * i][across() + kSide * j] = scores[i][j];
  }
  __syncthreads();
}

// To rows of a head from the first one on.
template <class T, int kColumns>
__device__ void store(const HeadsAt<void>& x, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t size,
                      const float (&sums)[kEach][kColumns]) {
  T* const to = static_cast<T*>(x.base) + at(x, batch, head) + first * x.row_stride;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = down() + kSide * i;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = across() + kSide * j;
      if (row < rows && column < size) to[row * x.row_stride + column] = static_cast<T>(sums[i][j]);
    }
  }
}

// What a thread block has: a tile of rows of one head, those first that see most.
struct Place {
  int64_t batch, head, first, of_lse;

  __device__ Place(int64_t heads, int64_t rows) {
    const int64_t tiles = (rows + kAttentionTile - 1) / kAttentionTile, row_of_tiles = blockIdx.x / tiles;
    batch = row_of_tiles / heads, head = row_of_tiles % heads;
    first = (tiles - 1 - blockIdx.x % tiles) * kAttentionTile;
    of_lse = row_of_tiles * rows;
  }
};

template <class T, int kColumns>
__device__ void attend(const AttentionKernel& p) {
  __shared__ Shared shared;
  const Place place(p.heads, p.rows);
  const int64_t group = place.head / (p.heads / p.groups);
  const Tile<T> q = tile<T>(p.q, place.batch, place.head, place.first, p.rows);
  const Sight sight(p, place.batch);
  const Bias<T> bias(p, place.batch, place.head);
  Span spans[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) spans[i] = sight.of(place.first + down() + kSide * i);
  float largest[kEach], sums[kEach] = {}, results[kEach][kColumns] = {};
#pragma unroll
  for (float& x : largest) x = none();
  const int64_t end = sight.of(place.first + q.rows - 1).end;
  for (int64_t column = sight.of(place.first).begin; column < end; column += kAttentionTile) {
    Scores scores;
    multiply(scores, q, tile<T>(p.k, place.batch, group, column, end), p.size, shared);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = place.first + down() + kSide * i;
      float most = largest[i], sum = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t of_score = column + across() + kSide * j;
        scores[i][j] = spans[i].has(of_score) ? scores[i][j] * p.scale + bias(row, of_score) : none();
        most = fmaxf(most, scores[i][j]);
      }
      most = reduced(most, [](float a, float b) { return fmaxf(a, b); });
      const float shift = most == none() ? 0 : most, before = expf(largest[i] - shift);
#pragma unroll
      for (int j = 0; j < kEach; ++j) sum += scores[i][j] = expf(scores[i][j] - shift);
      sums[i] = sums[i] * before + reduced(sum, [](float a, float b) { return a + b; });
      largest[i] = most;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) results[i][j] *= before;
    }
    keep(shared, scores);
    add_weighted(results, shared, tile<T>(p.v, place.batch, group, column, end), p.value_size);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float quotient = 1 / fmaxf(sums[i], 1);  // the largest is exp(0)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) results[i][j] *= quotient;
    const int row = down() + kSide * i;
    if (p.lse && across() == 0 && row < q.rows) p.lse[place.of_lse + place.first + row] = largest[i] + logf(sums[i]);
  }
  store<T>(p.o, place.batch, place.head, place.first, q.rows, p.value_size, results);
}

// Of each row of a tile the sum of o times its gradient, in shared memory.
template <class T>
__device__ void sum_products(const Tile<T>& o, const Tile<T>& gradient, int64_t size, Shared& shared) {
  constexpr int kLanes = kAttentionThreads / kAttentionTile;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum = 0;
  if (row < o.rows) {
    for (int64_t i = lane; i < size; i += kLanes) {
      sum += static_cast<float>(o.base[row * o.pitch + i]) * static_cast<float>(gradient.base[row * gradient.pitch + i]);
    }
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  __syncthreads();
  if (lane == 0) shared.sums[row] = sum;
  __syncthreads();
}

__device__ inline float weight(float score, float lse) { return lse == none() ? 0 : expf(score - lse); }

template <class T, int kColumns>
__device__ void differentiate_queries(const AttentionKernel& p) {
  __shared__ Shared shared;
  const Place place(p.heads, p.rows);
  const int64_t group = place.head / (p.heads / p.groups);
  const Tile<T> q = tile<T>(p.q, place.batch, place.head, place.first, p.rows);
  const Tile<T> given = tile<T>(p.o_gradient, place.batch, place.head, place.first, p.rows);
  const Sight sight(p, place.batch);
  const Bias<T> bias(p, place.batch, place.head);
  sum_products(tile<T>(p.o, place.batch, place.head, place.first, p.rows), given, p.value_size, shared);
  float results[kEach][kColumns] = {};
  const int64_t end = sight.of(place.first + q.rows - 1).end;
  for (int64_t column = sight.of(place.first).begin; column < end; column += kAttentionTile) {
    Scores scores, changes;
    const Tile<T> k = tile<T>(p.k, place.batch, group, column, end);
    multiply(scores, q, k, p.size, shared);
    multiply(changes, given, tile<T>(p.v, place.batch, group, column, end), p.value_size, shared);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = down() + kSide * i;
      const float lse = row < q.rows ? p.lse[place.of_lse + place.first + row] : none();
      const Span seen = sight.of(place.first + row);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t of_score = column + across() + kSide * j;
        const float own = seen.has(of_score) ? weight(scores[i][j] * p.scale + bias(place.first + row, of_score), lse) : 0;
        changes[i][j] = own * (changes[i][j] - shared.sums[row]) * p.scale;
      }
    }
    keep(shared, changes);
    add_weighted(results, shared, k, p.size);
  }
  store<T>(p.q_gradient, place.batch, place.head, place.first, q.rows, p.size, results);
}

// Rows of weights are those of keys here.
template <class T, int kColumns>
__device__ void differentiate_keys(const AttentionKernel& p) {
  __shared__ Shared shared;
  const Place place(p.groups, p.columns);
  const int64_t heads = p.heads / p.groups;
  const Tile<T> k = tile<T>(p.k, place.batch, place.head, place.first, p.columns);
  const Tile<T> v = tile<T>(p.v, place.batch, place.head, place.first, p.columns);
  const Sight sight(p, place.batch);
  float of_keys[kEach][kColumns] = {}, of_values[kEach][kColumns] = {};
  const auto [begin, end] = sight.rows_of(place.first, place.first + k.rows - 1);
  for (int64_t head = place.head * heads; head < (place.head + 1) * heads; ++head) {
    const float* const lse = p.lse + (place.batch * p.heads + head) * p.rows;
    const Bias<T> bias(p, place.batch, head);
    for (int64_t first = begin; first < end; first += kAttentionTile) {
      Scores scores, changes;
      const Tile<T> q = tile<T>(p.q, place.batch, head, first, p.rows);
      const Tile<T> given = tile<T>(p.o_gradient, place.batch, head, first, p.rows);
      sum_products(tile<T>(p.o, place.batch, head, first, p.rows), given, p.value_size, shared);
      multiply(scores, k, q, p.size, shared);
      multiply(changes, v, given, p.value_size, shared);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int row = across() + kSide * j;
        const float of_row = row < q.rows ? lse[first + row] : none();
        const Span seen = sight.of(first + row);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int64_t column = place.first + down() + kSide * i;
          scores[i][j] = seen.has(column) ? weight(scores[i][j] * p.scale + bias(first + row, column), of_row) : 0;
          changes[i][j] = scores[i][j] * (changes[i][j] - shared.sums[row]) * p.scale;
        }
      }
      keep(shared, scores);
      add_weighted(of_values, shared, given, p.value_size);
      __syncthreads();
      keep(shared, changes);
      add_weighted(of_keys, shared, q, p.size);
    }
  }
  store<T>(p.k_gradient, place.batch, place.head, place.first, k.rows, p.size, of_keys);
  store<T>(p.v_gradient, place.batch, place.head, place.first, k.rows, p.value_size, of_values);
}

}  // namespace

// No templates: nvcc gives those no name that another file can launch them by. For heads of up to so many elements.
#define HW_ATTENTION(T, kName, kHead)                                                                               \
  __global__ void __launch_bounds__(kAttentionThreads) attend_##kName##_##kHead(AttentionKernel p) {                \
    attend<T, kHead / kSide>(p);                                                                                    \
  }                                                                                                                 \
  __global__ void __launch_bounds__(kAttentionThreads) differentiate_queries_##kName##_##kHead(AttentionKernel p) { \
    differentiate_queries<T, kHead / kSide>(p);                                                                     \
  }                                                                                                                 \
  __global__ void __launch_bounds__(kAttentionThreads) differentiate_keys_##kName##_##kHead(AttentionKernel p) {    \
    differentiate_keys<T, kHead / kSide>(p);                                                                        \
  }

// The paragraphs below are compiled each by itself.

HW_ATTENTION(float, f32, 64)

HW_ATTENTION(float, f32, 128)

HW_ATTENTION(float, f32, 256)

HW_ATTENTION(__half, f16, 64)

HW_ATTENTION(__half, f16, 128)

HW_ATTENTION(__half, f16, 256)

HW_ATTENTION(__nv_bfloat16, bf16, 64)

HW_ATTENTION(__nv_bfloat16, bf16, 128)

HW_ATTENTION(__nv_bfloat16, bf16, 256)

__global__ void place_sequences_of(PackedSequences p) {
  const int64_t number = blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x, all = p.batch * p.sequences;
  if (number > all) return;
  const int64_t batch = number < all ? number / p.sequences : p.batch - 1, sequence = number - batch * p.sequences;
  const int32_t* const offset = p.offsets + batch * (p.sequences + 1) + sequence;
  if (number < all) p.rows[number] = p.columns[number] = offset[1] - offset[0];
  for (int i = 0; i < p.count; ++i) {
    const auto& [places, batch_stride, row_stride] = p.operands[i];
    places[number] = static_cast<int32_t>(batch * batch_stride + *offset * row_stride);
  }
}

__global__ void fill_outside_of(OutsideSequences p) {
  const int64_t row = blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x;
  if (row >= p.batch * p.heads * p.tokens) return;
  const int64_t token = row % p.tokens, head = row / p.tokens % p.heads, batch = row / p.tokens / p.heads;
  const int32_t* const offsets = p.offsets + batch * (p.sequences + 1);
  if (token >= offsets[0] && token < offsets[p.sequences]) return;
  uint16_t* const to = p.base + batch * p.batch_stride + head * p.head_stride + token * p.row_stride;
  for (int64_t i = 0; i < p.size; ++i) to[i] = p.value;
}

}  // namespace hw
