// Attention of f32 by tiles of scores, which are in registers and shared memory alone: a thread block has kAttentionTile rows of
// a head and walks their columns, correcting what it has when a larger score comes; for the gradients of keys and values it has
// columns, and walks rows. Sums are in one order, so that results do not change from run to run.
#include "hostweave/attention_f32.h"
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

__device__ inline int64_t at(const HeadsAt<const float>& x, int64_t batch, int64_t head) {
  return batch * x.batch_stride + head * x.head_stride;
}
__device__ inline int64_t at(const HeadsAt<float>& x, int64_t batch, int64_t head) {
  return batch * x.batch_stride + head * x.head_stride;
}

// Some rows of an operand.
struct Tile {
  const float* base;
  int64_t pitch, rows;
};

template <class T>
__device__ Tile tile(const HeadsAt<T>& x, int64_t batch, int64_t head, int64_t first, int64_t all) {
  return {x.base + at(x, batch, head) + first * x.row_stride, x.row_stride, min(int64_t{kAttentionTile}, all - first)};
}

// The columns that rows of one of the batch see: of each the one behind the last, and the first.
struct Sight {
  int64_t length, diagonal, window;
  bool causal;

  __device__ Sight(const AttentionF32& p, int64_t batch)
      : length(p.lengths ? max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.columns)) : p.columns),
        diagonal(p.diagonal + (p.from_end ? length : 0)),
        window(p.window),
        causal(p.causal) {}
  __device__ int64_t end(int64_t row) const { return causal ? max(int64_t{0}, min(row + diagonal + 1, length)) : length; }
  __device__ int64_t begin(int64_t row) const { return window ? max(int64_t{0}, row + diagonal + 1 - window) : 0; }
  __device__ bool sees(int64_t row, int64_t column) const { return column >= begin(row) && column < end(row); }
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
__device__ void multiply(Scores& scores, const Tile& a, const Tile& b, int64_t depth, Shared& shared) {
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
      shared.a[d][row] = is_term && row < a.rows ? a.base[row * a.pitch + first + d] : 0;
      shared.b[d][row] = is_term && row < b.rows ? b.base[row * b.pitch + first + d] : 0;
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
template <int kColumns>
__device__ void add_weighted(float (&sums)[kEach][kColumns], const Shared& shared, const Tile& x, int64_t size) {
  for (int term = 0; term < x.rows; ++term) {
    float weights[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) weights[i] = shared.weights[down() + kSide * i][term];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = across() + kSide * j;
      const float value = column < size ? x.base[term * x.pitch + column] : 0;
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

template <int kColumns>
__device__ void store(float* to, int64_t pitch, int64_t rows, int64_t size, const float (&sums)[kEach][kColumns]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = down() + kSide * i;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = across() + kSide * j;
      if (row < rows && column < size) to[row * pitch + column] = sums[i][j];
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

template <int kColumns>
__device__ void attend(const AttentionF32& p) {
  __shared__ Shared shared;
  const Place place(p.heads, p.rows);
  const int64_t group = place.head / (p.heads / p.groups);
  const Tile q = tile(p.q, place.batch, place.head, place.first, p.rows);
  const Sight sight(p, place.batch);
  float largest[kEach], sums[kEach] = {}, results[kEach][kColumns] = {};
#pragma unroll
  for (float& x : largest) x = none();
  const int64_t end = sight.end(place.first + q.rows - 1);
  for (int64_t column = sight.begin(place.first); column < end; column += kAttentionTile) {
    Scores scores;
    multiply(scores, q, tile(p.k, place.batch, group, column, end), p.size, shared);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = place.first + down() + kSide * i;
      float most = largest[i], sum = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        scores[i][j] = sight.sees(row, column + across() + kSide * j) ? scores[i][j] * p.scale : none();
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
    add_weighted(results, shared, tile(p.v, place.batch, group, column, end), p.value_size);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float quotient = 1 / fmaxf(sums[i], 1);  // the largest is exp(0)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) results[i][j] *= quotient;
    const int row = down() + kSide * i;
    if (p.lse && across() == 0 && row < q.rows) p.lse[place.of_lse + place.first + row] = largest[i] + logf(sums[i]);
  }
  store(p.o.base + at(p.o, place.batch, place.head) + place.first * p.o.row_stride, p.o.row_stride, q.rows, p.value_size,
        results);
}

// Of each row of a tile the sum of o times its gradient, in shared memory.
__device__ void sum_products(const Tile& o, const Tile& gradient, int64_t size, Shared& shared) {
  constexpr int kLanes = kAttentionThreads / kAttentionTile;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum = 0;
  if (row < o.rows) {
    for (int64_t i = lane; i < size; i += kLanes) sum += o.base[row * o.pitch + i] * gradient.base[row * gradient.pitch + i];
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  __syncthreads();
  if (lane == 0) shared.sums[row] = sum;
  __syncthreads();
}

__device__ inline float weight(float score, float lse) { return lse == none() ? 0 : expf(score - lse); }

template <int kColumns>
__device__ void differentiate_queries(const AttentionF32& p) {
  __shared__ Shared shared;
  const Place place(p.heads, p.rows);
  const int64_t group = place.head / (p.heads / p.groups);
  const Tile q = tile(p.q, place.batch, place.head, place.first, p.rows);
  const Tile given = tile(p.o_gradient, place.batch, place.head, place.first, p.rows);
  const Sight sight(p, place.batch);
  sum_products(tile(p.o, place.batch, place.head, place.first, p.rows), given, p.value_size, shared);
  float results[kEach][kColumns] = {};
  const int64_t end = sight.end(place.first + q.rows - 1);
  for (int64_t column = sight.begin(place.first); column < end; column += kAttentionTile) {
    Scores scores, changes;
    const Tile k = tile(p.k, place.batch, group, column, end);
    multiply(scores, q, k, p.size, shared);
    multiply(changes, given, tile(p.v, place.batch, group, column, end), p.value_size, shared);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = down() + kSide * i;
      const float lse = row < q.rows ? p.lse[place.of_lse + place.first + row] : none();
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const bool is_seen = sight.sees(place.first + row, column + across() + kSide * j);
        const float own = is_seen ? weight(scores[i][j] * p.scale, lse) : 0;
        changes[i][j] = own * (changes[i][j] - shared.sums[row]) * p.scale;
      }
    }
    keep(shared, changes);
    add_weighted(results, shared, k, p.size);
  }
  const HeadsAt<float>& to = p.q_gradient;
  store(to.base + at(to, place.batch, place.head) + place.first * to.row_stride, to.row_stride, q.rows, p.size, results);
}

// Rows of weights are those of keys here.
template <int kColumns>
__device__ void differentiate_keys(const AttentionF32& p) {
  __shared__ Shared shared;
  const Place place(p.groups, p.columns);
  const int64_t heads = p.heads / p.groups;
  const Tile k = tile(p.k, place.batch, place.head, place.first, p.columns);
  const Tile v = tile(p.v, place.batch, place.head, place.first, p.columns);
  const Sight sight(p, place.batch);
  float of_keys[kEach][kColumns] = {}, of_values[kEach][kColumns] = {};
  const int64_t last = place.first + k.rows - 1;
  const int64_t begin = sight.causal ? max(int64_t{0}, place.first - sight.diagonal) : 0;
  const int64_t end = sight.window ? min(p.rows, last - sight.diagonal + sight.window) : p.rows;
  for (int64_t head = place.head * heads; head < (place.head + 1) * heads; ++head) {
    const float* const lse = p.lse + (place.batch * p.heads + head) * p.rows;
    for (int64_t first = begin; first < end; first += kAttentionTile) {
      Scores scores, changes;
      const Tile q = tile(p.q, place.batch, head, first, p.rows), given = tile(p.o_gradient, place.batch, head, first, p.rows);
      sum_products(tile(p.o, place.batch, head, first, p.rows), given, p.value_size, shared);
      multiply(scores, k, q, p.size, shared);
      multiply(changes, v, given, p.value_size, shared);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int row = across() + kSide * j;
        const float of_row = row < q.rows ? lse[first + row] : none();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const bool is_seen = sight.sees(first + row, place.first + down() + kSide * i);
          scores[i][j] = is_seen ? weight(scores[i][j] * p.scale, of_row) : 0;
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
  const HeadsAt<float>&keys = p.k_gradient, &values = p.v_gradient;
  store(keys.base + at(keys, place.batch, place.head) + place.first * keys.row_stride, keys.row_stride, k.rows, p.size, of_keys);
  store(values.base + at(values, place.batch, place.head) + place.first * values.row_stride, values.row_stride, k.rows,
        p.value_size, of_values);
}

}  // namespace

// No templates: nvcc gives those no name that another file can launch them by. For heads of up to so many elements.
#define HW_ATTENTION(kHead)                                                                                             \
  __global__ void __launch_bounds__(kAttentionThreads) attend_f32_##kHead(AttentionF32 p) { attend<kHead / kSide>(p); } \
  __global__ void __launch_bounds__(kAttentionThreads) differentiate_queries_f32_##kHead(AttentionF32 p) {              \
    differentiate_queries<kHead / kSide>(p);                                                                            \
  }                                                                                                                     \
  __global__ void __launch_bounds__(kAttentionThreads) differentiate_keys_f32_##kHead(AttentionF32 p) {                 \
    differentiate_keys<kHead / kSide>(p);                                                                               \
  }

HW_ATTENTION(64)
HW_ATTENTION(128)
HW_ATTENTION(256)

}  // namespace hw
