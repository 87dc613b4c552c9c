// Attention by blocks of scores, in f32: a block of rows walks its columns and corrects what it has when a larger score comes
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
#include "attention.h"

#include <cmath>

#include "errors.h"

using namespace hostweave::cpu;

namespace {

struct Attention {
  hw_cpu_attention p;
  const void *q, *k, *v;
  void* o;
  float* lse;
  hw_cpu_attention_masks masks;

  cudaDataType_t dtype() const { return static_cast<cudaDataType_t>(p.dtype); }
};

// The rows of one block, as far as they have seen columns.
struct Block {
  std::int64_t first, rows;  // of the queries
  std::vector<float> q, k, v, scores, sums, largest, result;

  // Scores become exp(score - largest), and what was summed up before is scaled to the same.
  void see(const hw_cpu_attention& p, const Sight& sight, std::int64_t column, std::int64_t columns) {
    for (std::int64_t row = 0; row < rows; ++row) {
      float* const score = scores.data() + row * columns;
      const std::int64_t end = std::clamp<std::int64_t>(sight.end(first + row) - column, 0, columns);
      const std::int64_t begin = std::clamp<std::int64_t>(sight.begin(first + row) - column, 0, end);
      float most = largest[row];
      for (std::int64_t i = begin; i < end; ++i) most = std::max(most, score[i]);
      std::fill(score, score + begin, 0.f);
      std::fill(score + end, score + columns, 0.f);
      if (most == kNone) {  // it has seen nothing yet
        std::fill(score + begin, score + end, 0.f);
        continue;
      }
      const float before = std::exp(largest[row] - most);
      float sum = 0;
      for (std::int64_t i = begin; i < end; ++i) sum += score[i] = std::exp(score[i] - most);
      sums[row] = sums[row] * before + sum;
      largest[row] = most;
      const std::int64_t size = p.v.size;
      for (std::int64_t i = 0; i < size; ++i) result[row * size + i] *= before;
    }
  }
};

void attend(const Attention& a, std::int64_t batch, std::int64_t head, std::int64_t first) {
  const hw_cpu_attention& p = a.p;
  thread_local Block block;
  block.first = first, block.rows = std::min(kRows, p.q.rows - first);
  const std::int64_t rows = block.rows, group = head / (p.q.heads / p.k.heads);
  block.largest.assign(rows, kNone), block.sums.assign(rows, 0.f), block.result.assign(rows * p.v.size, 0.f);
  load_rows(block.q, shift(a.q, offset(p.q, batch, head), a.dtype()), p.q, first, rows, a.dtype());
  const void* const k = shift(a.k, offset(p.k, batch, group), a.dtype());
  const void* const v = shift(a.v, offset(p.v, batch, group), a.dtype());
  const Sight sight(p, a.masks, batch);
  const std::int64_t end = sight.end(first + rows - 1), begin = sight.begin(first);
  for (std::int64_t column = begin; column < end; column += kColumns) {
    const std::int64_t columns = std::min(kColumns, end - column);
    load_rows(block.k, k, p.k, column, columns, a.dtype());
    load_rows(block.v, v, p.v, column, columns, a.dtype());
    block.scores.resize(rows * columns);
    product({block.q.data()}, {block.k.data(), true}, block.scores.data(), rows, columns, p.q.size, p.scale, 0);
    add_bias(block.scores.data(), p, a.masks.bias, batch, head, first, rows, column, columns);
    block.see(p, sight, column, columns);
    product({block.scores.data()}, {block.v.data()}, block.result.data(), rows, p.v.size, columns, 1, 1);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    float* const result = block.result.data() + row * p.v.size;
    for (std::int64_t i = 0; i < p.v.size; ++i) result[i] /= std::max(block.sums[row], 1.f);  // the largest is exp(0)
    store_row(shift(a.o, offset(p.o, batch, head) + (first + row) * p.o.row_stride, a.dtype()), result, p.v.size, a.dtype());
    if (a.lse) a.lse[(batch * p.q.heads + head) * p.q.rows + first + row] = block.largest[row] + std::log(block.sums[row]);
  }
}

}  // namespace

extern "C" cudaError_t hw_cpu_attend(const hw_cpu_attention* problem, const void* q, const void* k, const void* v, void* o,
                                     float* lse, const hw_cpu_attention_masks* masks, cudaStream_t stream) {
  const Attention a{*problem, q, k, v, o, lse, *masks};
  const hw_cpu_attention& p = a.p;
  if (type_size(a.dtype()) == 0 || a.dtype() == CUDA_R_64F) return cuda_not_supported("attention of this type");
  OpPtr op = new_op("attention", 3);
  add_ranges(op->ranges, q, p.q, a.dtype(), false);
  add_ranges(op->ranges, k, p.k, a.dtype(), false);
  add_ranges(op->ranges, v, p.v, a.dtype(), false);
  add_ranges(op->ranges, o, p.o, a.dtype(), true);
  add_masks(op->ranges, p, a.masks);
  if (lse) op->ranges.push_back(write_of(lse, p.q.batch * p.q.heads * p.q.rows * sizeof(float)));
  op->work = [a] {
    const std::int64_t blocks = (a.p.q.rows + kRows - 1) / kRows;
    Machine::get().split(a.p.q.batch * a.p.q.heads * blocks, 1, [&](std::size_t begin, std::size_t end) {
      for (auto i = static_cast<std::int64_t>(begin); i < static_cast<std::int64_t>(end); ++i) {
        attend(a, i / blocks / a.p.q.heads, i / blocks % a.p.q.heads, i % blocks * kRows);
      }
    });
  };
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  return submit(call.lock, std::move(op), stream);
}
