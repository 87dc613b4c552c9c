// Attention by tiles of f32 scores, on GPUs and the CPU device. A thread block owns kAttentionTile rows of a head, and loops over
// the columns of the scores. When the maximum of a row grows, the block rescales the row's sums (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). For the gradients of keys and values, a block
// owns columns and loops over rows. Each result is written by one block, so results are deterministic.
#pragma once
#include "hostweave/attention_tiles.h"

namespace hw {

namespace {

HW_DEVICE float none() { return -INFINITY; }

// Bias of the scores of one head.
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

// Stores a tile to the rows of a head, from row `first` on.
template <class T, int kWidth>
__device__ void store(const HeadsAt<void>& x, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t size,
                      const Part<Products<T>, kWidth>& sums) {
  using Its = Products<T>;
  T* const to = static_cast<T*>(x.base) + at(x, batch, head) + first * x.row_stride;
  HW_UNROLL
  for (int i = 0; i < Its::rows(rows); ++i) {
    HW_UNROLL
    for (int j = 0; j < Its::template columns<kWidth>(size); ++j) {
      const int row = Its::row(i), column = Its::column(j);
      if (row < rows && column < size) to[row * x.row_stride + column] = static_cast<T>(sums[i][j]);
    }
  }
}

// Tile of a thread block. The last tile of a head comes first: in causal attention, the last rows attend to the most columns.
struct BlockPosition {
  int64_t batch, head, first, of_lse;

  __device__ BlockPosition(int64_t block, int64_t heads, int64_t rows) {
    const int64_t tiles = (rows + kAttentionTile - 1) / kAttentionTile, row_of_tiles = block / tiles;
    batch = row_of_tiles / heads, head = row_of_tiles % heads;
    first = (tiles - 1 - block % tiles) * kAttentionTile;
    of_lse = row_of_tiles * rows;
  }
};

template <class T, int kHead>
__device__ void attend(const AttentionKernel& p, int64_t block) {
  using Its = Products<T>;
  HW_SHARED Its products;
  const BlockPosition position(block, p.heads, p.rows);
  const int64_t group = position.head / (p.heads / p.groups);
  const Tile<T> q = tile<T>(p.q, p.size, position.batch, position.head, position.first, p.rows);
  const Sight sight(p, position.batch);
  const Bias<T> bias(p, position.batch, position.head);
  const int rows = Its::rows(q.rows), width = Its::template columns<kHead>(p.value_size);
  Span spans[Its::kRows];
  HW_UNROLL
  for (int i = 0; i < rows; ++i) spans[i] = sight.of(position.first + Its::row(i));
  float largest[Its::kRows], sums[Its::kRows] = {};
  Part<Its, kHead> results;
  clear(results);
  HW_UNROLL
  for (float& x : largest) x = none();
  const int64_t end = sight.of(position.first + q.rows - 1).end;
  for (int64_t column = sight.of(position.first).begin; column < end; column += kTileSide) {
    typename Its::Scores scores;
    const Tile<T> k = tile<T>(p.k, p.size, position.batch, group, column, end);
    const int columns = Its::template columns<kTileSide>(k.rows);
    products.multiply(scores, q, k);
    float most[Its::kRows];
    HW_UNROLL
    for (int i = 0; i < rows; ++i) {
      most[i] = largest[i];
      HW_UNROLL
      for (int j = 0; j < columns; ++j) {
        const int64_t of_score = column + Its::column(j);
        float& score = scores[i][j];
        score = spans[i].has(of_score) ? score * p.scale + bias(position.first + Its::row(i), of_score) : none();
        most[i] = fmaxf(most[i], score);
      }
    }
    products.combine(most, [](float a, float b) { return fmaxf(a, b); });
    HW_UNROLL
    for (int i = 0; i < rows; ++i) {
      // The maximum of a row is none() if the row has attended to no column yet.
      const float shift = most[i] == none() ? 0 : most[i], before = expf(largest[i] - shift);
      sums[i] *= before, largest[i] = most[i];
      HW_UNROLL
      for (int j = 0; j < columns; ++j) sums[i] += scores[i][j] = expf(scores[i][j] - shift);
      HW_UNROLL
      for (int j = 0; j < width; ++j) results[i][j] *= before;
    }
    products.keep(scores);
    products.template add_weighted<kHead>(results, tile<T>(p.v, p.value_size, position.batch, group, column, end));
  }
  wait_for_threads();
  products.combine(sums, [](float a, float b) { return a + b; });
  HW_UNROLL
  for (int i = 0; i < rows; ++i) {
    const float quotient = 1 / fmaxf(sums[i], 1);  // the sum is 0 without columns, otherwise at least exp(0) = 1
    HW_UNROLL
    for (int j = 0; j < width; ++j) results[i][j] *= quotient;
    const int row = Its::row(i);
    if (p.lse && Its::column(0) == 0 && row < q.rows) p.lse[position.of_lse + position.first + row] = largest[i] + logf(sums[i]);
  }
  store<T, kHead>(p.o, position.batch, position.head, position.first, q.rows, p.value_size, results);
}

// Data of a tile of rows for the backward pass, in shared memory.
struct Rows {
  int32_t begin[kTileSide], end[kTileSide];  // columns that each row attends to
  float lse[kTileSide];
  float sums[kTileSide];  // for each row: sum of o times the gradient of o

  __device__ bool sees(int row, int64_t column) const { return column >= begin[row] && column < end[row]; }
};

// Loads the row data of a tile. Other threads see these data after the barrier of the next product.
template <class T>
__device__ void load_rows(Rows& rows, const AttentionKernel& p, const Sight& sight, int64_t batch, int64_t head, int64_t first) {
  wait_for_threads();
  for (const int64_t row : over_threads(kTileSide)) {
    const int64_t own = first + row;
    const Span seen = sight.of(own);
    rows.begin[row] = seen.begin, rows.end[row] = seen.end;
    rows.lse[row] = own < p.rows ? p.lse[(batch * p.heads + head) * p.rows + own] : none();
  }
  add_products(rows.sums, tile<T>(p.o, p.value_size, batch, head, first, p.rows),
               tile<T>(p.o_gradient, p.value_size, batch, head, first, p.rows));
}

HW_DEVICE float weight(float score, float lse) { return lse == none() ? 0 : expf(score - lse); }

// Computes the gradients of a tile of scores, for columns before `end`.
template <class T>
__device__ void differentiate_scores(typename Products<T>::Scores& scores, Products<T>& products, const Rows& rows,
                                     const AttentionKernel& p, int64_t batch, int64_t head, int64_t first, int64_t column,
                                     int64_t end) {
  using Its = Products<T>;
  const int64_t group = head / (p.heads / p.groups);
  const Bias<T> bias(p, batch, head);
  const Tile<T> q = tile<T>(p.q, p.size, batch, head, first, p.rows), k = tile<T>(p.k, p.size, batch, group, column, end);
  typename Its::Scores changes;
  products.multiply(scores, q, k);
  products.multiply(changes, tile<T>(p.o_gradient, p.value_size, batch, head, first, p.rows),
                    tile<T>(p.v, p.value_size, batch, group, column, end));
  HW_UNROLL
  for (int i = 0; i < Its::rows(q.rows); ++i) {
    const int row = Its::row(i);
    HW_UNROLL
    for (int j = 0; j < Its::template columns<kTileSide>(k.rows); ++j) {
      const int64_t of_score = column + Its::column(j);
      const bool sees = rows.sees(row, of_score);
      const float own = sees ? weight(scores[i][j] * p.scale + bias(first + row, of_score), rows.lse[row]) : 0;
      scores[i][j] = sees ? own * (changes[i][j] - rows.sums[row]) : 0;  // scores of padding are undefined
    }
  }
}

template <class T, int kHead>
__device__ void differentiate_queries(const AttentionKernel& p, int64_t block) {
  using Its = Products<T>;
  HW_SHARED Its products;
  HW_SHARED Rows rows;
  const BlockPosition position(block, p.heads, p.rows);
  const int64_t batch = position.batch, head = position.head, first = position.first, group = head / (p.heads / p.groups);
  const Sight sight(p, batch);
  const int64_t count = Sight::least(kTileSide, p.rows - first), end = sight.of(first + count - 1).end;
  load_rows<T>(rows, p, sight, batch, head, first);
  Part<Its, kHead> results;
  clear(results);
  for (int64_t column = sight.of(first).begin; column < end; column += kTileSide) {
    typename Its::Scores scores;
    differentiate_scores<T>(scores, products, rows, p, batch, head, first, column, end);
    products.keep(scores);
    products.template add_weighted<kHead>(results, tile<T>(p.k, p.size, batch, group, column, end));
  }
  HW_UNROLL
  for (auto& row : results) {
    HW_UNROLL
    for (float& result : row) result *= p.scale;
  }
  store<T, kHead>(p.q_gradient, batch, head, first, count, p.size, results);
}

// Gradients of keys and values. Here rows of the scores are keys.
template <class T, int kHead>
__device__ void differentiate_keys(const AttentionKernel& p, int64_t block) {
  using Its = Products<T>;
  HW_SHARED Its products;
  HW_SHARED Rows rows;
  const BlockPosition position(block, p.groups, p.columns);
  const int64_t batch = position.batch, heads = p.heads / p.groups;
  const Tile<T> k = tile<T>(p.k, p.size, batch, position.head, position.first, p.columns);
  const Tile<T> v = tile<T>(p.v, p.value_size, batch, position.head, position.first, p.columns);
  const Sight sight(p, batch);
  Part<Its, kHead> of_keys, of_values;
  clear(of_keys), clear(of_values);
  const auto [begin, end] = sight.rows_of(position.first, position.first + k.rows - 1);
  for (int64_t head = position.head * heads; head < (position.head + 1) * heads; ++head) {
    const Bias<T> bias(p, batch, head);
    for (int64_t first = begin; first < end; first += kTileSide) {
      typename Its::Scores scores, changes;
      const Tile<T> q = tile<T>(p.q, p.size, batch, head, first, p.rows);
      const Tile<T> given = tile<T>(p.o_gradient, p.value_size, batch, head, first, p.rows);
      load_rows<T>(rows, p, sight, batch, head, first);
      products.multiply(scores, k, q);
      products.multiply(changes, v, given);
      HW_UNROLL
      for (int j = 0; j < Its::template columns<kTileSide>(q.rows); ++j) {
        const int row = Its::column(j);
        HW_UNROLL
        for (int i = 0; i < Its::rows(k.rows); ++i) {
          const int64_t column = position.first + Its::row(i);
          const bool sees = rows.sees(row, column);
          scores[i][j] = sees ? weight(scores[i][j] * p.scale + bias(first + row, column), rows.lse[row]) : 0;
          changes[i][j] = sees ? scores[i][j] * (changes[i][j] - rows.sums[row]) * p.scale : 0;
        }
      }
      products.keep(scores);
      products.template add_weighted<kHead>(of_values, given);
      wait_for_threads();
      products.keep(changes);
      products.template add_weighted<kHead>(of_keys, q);
    }
  }
  store<T, kHead>(p.k_gradient, batch, position.head, position.first, k.rows, p.size, of_keys);
  store<T, kHead>(p.v_gradient, batch, position.head, position.first, k.rows, p.value_size, of_values);
}

// Gradient of the bias. A block owns a tile of the bias, and sums the gradients of all scores to which this tile is added.
template <class T>
__device__ void differentiate_bias(const AttentionKernel& p, int64_t block) {
  using Its = Products<T>;
  HW_SHARED Its products;
  HW_SHARED Rows rows;
  const BiasGradient& bias = p.bias_gradient;
  const int64_t columns = (p.columns + kTileSide - 1) / kTileSide, strips = (bias.rows + kTileSide - 1) / kTileSide;
  const int64_t of_rows = block / columns, of_heads = of_rows / strips;
  const int64_t column = block % columns * kTileSide, own_first = of_rows % strips * kTileSide;
  const int64_t own_head = of_heads % bias.heads, own_batch = of_heads / bias.heads;
  const auto ends = [](int64_t own, int64_t count, int64_t all) {
    return Span{count == 1 ? 0 : own, count == 1 ? all : own + 1};
  };
  const Span batches = ends(own_batch, bias.batch, p.batch), heads = ends(own_head, bias.heads, p.heads);
  const bool has_rows = bias.rows != 1;
  typename Its::Scores sums, scores;
  clear(sums);
  for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
    const Sight sight(p, batch);
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      for (int64_t first = has_rows ? own_first : 0; first < (has_rows ? own_first + 1 : p.rows); first += kTileSide) {
        const int64_t last = Sight::least(first + kTileSide, p.rows) - 1, end = sight.of(last).end;
        if (column >= end || column + kTileSide <= sight.of(first).begin) continue;
        load_rows<T>(rows, p, sight, batch, head, first);
        differentiate_scores<T>(scores, products, rows, p, batch, head, first, column, end);
        HW_UNROLL
        for (int i = 0; i < Its::rows(last + 1 - first); ++i) {
          HW_UNROLL
          for (int j = 0; j < Its::template columns<kTileSide>(end - column); ++j) sums[i][j] += scores[i][j];
        }
      }
    }
  }
  const auto size = Sight::least(kTileSide, p.columns - column);
  HeadsAt<void> to = bias.at;
  to.base = static_cast<T*>(to.base) + column;
  if (has_rows) {
    store<T, kTileSide>(to, own_batch, own_head, own_first, Sight::least(kTileSide, bias.rows - own_first), size, sums);
    return;
  }
  const auto all = products.floats();
  wait_for_threads();
  HW_UNROLL
  for (int i = 0; i < Its::kRows; ++i) {
    HW_UNROLL
    for (int j = 0; const float sum : sums[i]) all[Its::row(i)][Its::column(j++)] = sum;
  }
  wait_for_threads();
  for (const int64_t own : over_threads(size)) {
    float sum = 0;
    for (int row = 0; row < kTileSide; ++row) sum += all[row][own];
    (static_cast<T*>(to.base) + at(to, own_batch, own_head))[own] = static_cast<T>(sum);
  }
}

}  // namespace
}  // namespace hw
