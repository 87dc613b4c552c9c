// The backward pass of attention by blocks of scores, in f32. A block of rows walks its columns for the gradient of the queries,
// and a block of columns the rows that see them for those of the keys and values, so that nothing is added up between threads.
#include <cmath>

#include "attention.h"
#include "errors.h"

using namespace hostweave::cpu;

namespace {

struct Backward {
  hw_cpu_attention p;
  hw_cpu_attention_gradients gradients;
  const void *q, *k, *v, *o;
  const float* lse;
  const void* o_gradient;
  void *q_gradient, *k_gradient, *v_gradient, *bias_gradient;
  hw_cpu_attention_masks masks;

  cudaDataType_t dtype() const { return static_cast<cudaDataType_t>(p.dtype); }
};

const void* head_of(const void* base, const hw_cpu_heads& x, std::int64_t batch, std::int64_t head, cudaDataType_t type) {
  return shift(base, offset(x, batch, head), type);
}

void store_rows(void* base, const hw_cpu_heads& x, std::int64_t batch, std::int64_t head, std::int64_t first, std::int64_t count,
                const std::vector<float>& from, cudaDataType_t type) {
  for (std::int64_t row = 0; row < count; ++row) {
    store_row(shift(base, offset(x, batch, head) + (first + row) * x.row_stride, type), from.data() + row * x.size, x.size, type);
  }
}

// A block of scores: what weighs the values, and the gradient of the scores.
struct ScoreBlock {
  std::int64_t row, rows, column, columns;  // where it begins, and how many there are
  std::vector<float> q, o, o_gradient, k, v, sums, weights, gradients, result, second;

  void load_queries(const Backward& a, std::int64_t batch, std::int64_t head) {
    const hw_cpu_attention& p = a.p;
    load_rows(q, head_of(a.q, p.q, batch, head, a.dtype()), p.q, row, rows, a.dtype());
    load_rows(o, head_of(a.o, p.o, batch, head, a.dtype()), p.o, row, rows, a.dtype());
    load_rows(o_gradient, head_of(a.o_gradient, a.gradients.o, batch, head, a.dtype()), a.gradients.o, row, rows, a.dtype());
    sums.assign(rows, 0.f);
    for (std::int64_t i = 0; i < rows * p.o.size; ++i) sums[i / p.o.size] += o[i] * o_gradient[i];
  }

  void load_keys(const Backward& a, std::int64_t batch, std::int64_t group) {
    load_rows(k, head_of(a.k, a.p.k, batch, group, a.dtype()), a.p.k, column, columns, a.dtype());
    load_rows(v, head_of(a.v, a.p.v, batch, group, a.dtype()), a.p.v, column, columns, a.dtype());
  }

  void compute(const Backward& a, const Sight& sight, std::int64_t batch, std::int64_t head) {
    const hw_cpu_attention& p = a.p;
    weights.resize(rows * columns), gradients.resize(rows * columns);
    product({q.data()}, {k.data(), true}, weights.data(), rows, columns, p.q.size, p.scale, 0);
    add_bias(weights.data(), p, a.masks.bias, batch, head, row, rows, column, columns);
    product({o_gradient.data()}, {v.data(), true}, gradients.data(), rows, columns, p.v.size, 1, 0);
    const float* const lse = a.lse + (batch * p.q.heads + head) * p.q.rows + row;
    for (std::int64_t i = 0; i < rows; ++i) {
      float *const weight = weights.data() + i * columns, *const gradient = gradients.data() + i * columns;
      const std::int64_t end = std::clamp<std::int64_t>(sight.end(row + i) - column, 0, columns);
      const std::int64_t begin = std::clamp<std::int64_t>(sight.begin(row + i) - column, 0, end);
      for (std::int64_t j = 0; j < columns; ++j) {
        const bool sees = begin <= j && j < end && weight[j] != kNone;
        weight[j] = sees ? std::exp(weight[j] - lse[i]) : 0.f;
        gradient[j] = sees ? weight[j] * (gradient[j] - sums[i]) : 0.f;
      }
    }
  }
};

thread_local ScoreBlock block;

void of_rows(const Backward& a, std::int64_t batch, std::int64_t head, std::int64_t first) {
  const hw_cpu_attention& p = a.p;
  const Sight sight(p, a.masks, batch);
  block.row = first, block.rows = std::min(kRows, p.q.rows - first);
  block.load_queries(a, batch, head);
  block.result.assign(block.rows * p.q.size, 0.f);
  const std::int64_t end = sight.end(first + block.rows - 1);
  for (block.column = sight.begin(first); block.column < end; block.column += kColumns) {
    block.columns = std::min(kColumns, end - block.column);
    block.load_keys(a, batch, head / (p.q.heads / p.k.heads));
    block.compute(a, sight, batch, head);
    product({block.gradients.data()}, {block.k.data()}, block.result.data(), block.rows, p.q.size, block.columns, p.scale, 1);
  }
  store_rows(a.q_gradient, a.gradients.q, batch, head, first, block.rows, block.result, a.dtype());
}

void of_columns(const Backward& a, std::int64_t batch, std::int64_t group, std::int64_t first) {
  const hw_cpu_attention& p = a.p;
  const Sight sight(p, a.masks, batch);
  const std::int64_t count = std::min(kColumns, p.k.rows - first), heads = p.q.heads / p.k.heads;
  block.result.assign(count * p.k.size, 0.f), block.second.assign(count * p.v.size, 0.f);
  block.column = first, block.columns = std::clamp<std::int64_t>(sight.length - first, 0, count);  // padding has zeros
  if (block.columns > 0) block.load_keys(a, batch, group);
  for (std::int64_t head = group * heads; block.columns > 0 && head < (group + 1) * heads; ++head) {
    for (block.row = 0; block.row < p.q.rows; block.row += kRows) {
      block.rows = std::min(kRows, p.q.rows - block.row);
      if (sight.end(block.row + block.rows - 1) <= first || sight.begin(block.row) >= first + block.columns) continue;
      block.load_queries(a, batch, head);
      block.compute(a, sight, batch, head);
      const Matrix weights{block.weights.data(), true}, gradients{block.gradients.data(), true};
      product(gradients, {block.q.data()}, block.result.data(), block.columns, p.k.size, block.rows, p.scale, 1);
      product(weights, {block.o_gradient.data()}, block.second.data(), block.columns, p.v.size, block.rows, 1, 1);
    }
  }
  store_rows(a.k_gradient, a.gradients.k, batch, group, first, count, block.result, a.dtype());
  store_rows(a.v_gradient, a.gradients.v, batch, group, first, count, block.second, a.dtype());
}

// Of some columns of the bias in a row, or in all where they have one in common, the sum over all that they are added to.
void of_bias(const Backward& a, std::int64_t batch, std::int64_t head, std::int64_t first) {
  const hw_cpu_attention& p = a.p;
  const hw_cpu_heads& bias = a.gradients.bias;
  const auto ends = [](std::int64_t own, std::int64_t count, std::int64_t all) {
    return count == 1 ? std::pair{std::int64_t{0}, all} : std::pair{own, own + 1};
  };
  const auto [first_batch, last_batch] = ends(batch, bias.batch, p.q.batch);
  const auto [first_head, last_head] = ends(head, bias.heads, p.q.heads);
  const std::int64_t end = bias.rows == 1 ? p.q.rows : std::min(first + kRows, p.q.rows);
  const std::int64_t rows = std::min(kRows, bias.rows - first);
  std::vector<float>& sums = block.second;
  for (block.column = 0; block.column < bias.size; block.column += kColumns) {
    block.columns = std::min(kColumns, bias.size - block.column);
    sums.assign(rows * block.columns, 0.f);
    for (std::int64_t of_batch = first_batch; of_batch < last_batch; ++of_batch) {
      const Sight sight(p, a.masks, of_batch);
      for (std::int64_t of_head = first_head; of_head < last_head; ++of_head) {
        block.load_keys(a, of_batch, of_head / (p.q.heads / p.k.heads));
        for (block.row = first; block.row < end; block.row += kRows) {
          block.rows = std::min(kRows, end - block.row);
          block.load_queries(a, of_batch, of_head);
          block.compute(a, sight, of_batch, of_head);
          const auto count = static_cast<std::int64_t>(sums.size());
          for (std::int64_t i = 0; i < block.rows * block.columns; ++i) sums[i % count] += block.gradients[i];
        }
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      void* const to =
          shift(a.bias_gradient, offset(bias, batch, head) + (first + row) * bias.row_stride + block.column, a.dtype());
      store_row(to, sums.data() + row * block.columns, block.columns, a.dtype());
    }
  }
}

// Blocks of an operand: which function computes one, and how many rows it has.
struct Blocks {
  void (*of)(const Backward& a, std::int64_t batch, std::int64_t head, std::int64_t first);
  const hw_cpu_heads& x;
  std::int64_t rows;

  std::int64_t each() const { return (x.rows + rows - 1) / rows; }
  std::int64_t count() const { return x.batch * x.heads * each(); }
};

void differentiate(const Backward& a) {
  std::vector<Blocks> kinds{{of_rows, a.p.q, kRows}, {of_columns, a.p.k, kColumns}};
  if (a.bias_gradient) kinds.push_back({of_bias, a.gradients.bias, kRows});
  std::int64_t all = 0;
  for (const Blocks& kind : kinds) all += kind.count();
  Machine::get().split(all, 1, [&](std::size_t begin, std::size_t end) {
    for (auto i = static_cast<std::int64_t>(begin); i < static_cast<std::int64_t>(end); ++i) {
      std::int64_t number = i;
      auto kind = kinds.begin();
      for (; number >= kind->count(); ++kind) number -= kind->count();
      const std::int64_t row = number / kind->each();
      kind->of(a, row / kind->x.heads, row % kind->x.heads, number % kind->each() * kind->rows);
    }
  });
}

}  // namespace

extern "C" cudaError_t hw_cpu_attend_backward(const hw_cpu_attention* problem, const hw_cpu_attention_gradients* gradients,
                                              const void* q, const void* k, const void* v, const void* o, const float* lse,
                                              const void* o_gradient, void* q_gradient, void* k_gradient, void* v_gradient,
                                              void* bias_gradient, const hw_cpu_attention_masks* masks, cudaStream_t stream) {
  const Backward a{*problem, *gradients, q, k, v, o, lse, o_gradient, q_gradient, k_gradient, v_gradient, bias_gradient, *masks};
  if (type_size(a.dtype()) == 0 || a.dtype() == CUDA_R_64F) return cuda_not_supported("attention of this type");
  OpPtr op = new_op("attention backward", 3);
  add_ranges(op->ranges, q, a.p.q, a.dtype(), false);
  add_ranges(op->ranges, k, a.p.k, a.dtype(), false);
  add_ranges(op->ranges, v, a.p.v, a.dtype(), false);
  add_ranges(op->ranges, o, a.p.o, a.dtype(), false);
  add_ranges(op->ranges, o_gradient, a.gradients.o, a.dtype(), false);
  add_ranges(op->ranges, q_gradient, a.gradients.q, a.dtype(), true);
  add_ranges(op->ranges, k_gradient, a.gradients.k, a.dtype(), true);
  add_ranges(op->ranges, v_gradient, a.gradients.v, a.dtype(), true);
  if (bias_gradient) add_ranges(op->ranges, bias_gradient, a.gradients.bias, a.dtype(), true);
  op->ranges.push_back(read_of(lse, a.p.q.batch * a.p.q.heads * a.p.q.rows * sizeof(float)));
  add_masks(op->ranges, a.p, a.masks);
  op->work = [a] { differentiate(a); };
  Call call;
  if (Machine::get().failed()) return cuda_stopped();
  return submit(call.lock, std::move(op), stream);
}
