// Attention on the CPU device by blocks of scores, in f32. A block of rows walks its columns and corrects what it has when a
// larger score comes (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
// 2022). In the backward pass a block of rows walks its columns for the gradient of the queries, and a block of columns the rows
// that see them for those of the keys and values, so that nothing is added up between threads.
#include <hostweave_cpu.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_plans.h"
#include "hostweave/index.h"
#include "hostweave/types.h"

namespace hw {

const AttentionKernels attention_f32_64{}, attention_f32_128{}, attention_f32_256{};
const AttentionKernels attention_f16_64{}, attention_f16_128{}, attention_f16_256{};
const AttentionKernels attention_bf16_64{}, attention_bf16_128{}, attention_bf16_256{};

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 64, kColumns = 256;  // of a block of scores

using Floats = std::vector<float>;

// A block of scores of a head of the queries: where it begins, how many there are, and what is computed with it.
struct Block {
  int64_t batch, head, row, rows, column, columns;
  Floats q, k, v, o, o_gradient, bias, scores, changes, sums, largest, result, second;
};
thread_local Block block;

template <class T, class Memory>
Memory* at(const HeadsAt<Memory>& x, int64_t head, int64_t row, int64_t column = 0) {
  using Elements = std::conditional_t<std::is_const_v<Memory>, const T, T>;
  return static_cast<Elements*>(x.base) + block.batch * x.batch_stride + head * x.head_stride + row * x.row_stride + column;
}

// So many rows of a head from the first on, side by side.
template <class T, class Memory>
void load(Floats& to, const HeadsAt<Memory>& x, int64_t head, int64_t first, int64_t rows, int64_t size, int64_t column = 0) {
  to.resize(rows * size);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* const from = static_cast<const T*>(at<T>(x, head, first + row, column));
    for (int64_t i = 0; i < size; ++i) to[row * size + i] = static_cast<float>(from[i]);
  }
}
template <class T>
void store(const HeadsAt<void>& x, int64_t head, int64_t first, int64_t rows, int64_t size, const Floats& from,
           int64_t column = 0) {
  for (int64_t row = 0; row < rows; ++row) {
    auto* const to = static_cast<T*>(at<T>(x, head, first + row, column));
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(from[row * size + i]);
  }
}

int64_t group_of(const AttentionKernel& p, int64_t head) { return head / (p.heads / p.groups); }

template <class T>
void load_keys(const AttentionKernel& p) {
  load<T>(block.k, p.k, group_of(p, block.head), block.column, block.columns, p.size);
  load<T>(block.v, p.v, group_of(p, block.head), block.column, block.columns, p.value_size);
}

// The scores, -inf where a row does not see a column.
template <class T>
void score(const AttentionKernel& p, const Sight& sight) {
  const int64_t columns = block.columns;
  block.scores.resize(block.rows * columns);
  hw_cpu_multiply(block.q.data(), false, block.k.data(), true, block.scores.data(), block.rows, columns, p.size, p.scale, 0);
  if (p.bias.base) load<T>(block.bias, p.bias, block.head, block.row, block.rows, columns, block.column);
  for (int64_t row = 0; row < block.rows; ++row) {
    const Span seen = sight.of(block.row + row);
    for (int64_t j = 0, i = row * columns; j < columns; ++j, ++i) {
      block.scores[i] = seen.has(block.column + j) ? block.scores[i] + (p.bias.base ? block.bias[i] : 0) : kNone;
    }
  }
}

template <class T>
void attend(const AttentionKernel& p, int64_t head, int64_t first) {
  block.row = first, block.rows = std::min(kRows, p.rows - first);
  const int64_t rows = block.rows, size = p.value_size;
  block.largest.assign(rows, kNone), block.sums.assign(rows, 0.f), block.result.assign(rows * size, 0.f);
  load<T>(block.q, p.q, head, first, rows, p.size);
  const Sight sight(p, block.batch);
  const int64_t end = sight.of(first + rows - 1).end;
  for (block.column = sight.of(first).begin; block.column < end; block.column += kColumns) {
    block.columns = std::min(kColumns, end - block.column);
    load_keys<T>(p);
    score<T>(p, sight);
    // Scores become exp(score - largest), and what was summed up before is scaled to the same.
    for (int64_t row = 0; row < rows; ++row) {
      float* const scores = block.scores.data() + row * block.columns;
      const float most = std::max(block.largest[row], *std::max_element(scores, scores + block.columns));
      const float shift = most == kNone ? 0 : most;  // it has seen nothing yet
      const float before = std::exp(block.largest[row] - shift);
      float sum = 0;
      for (int64_t i = 0; i < block.columns; ++i) sum += scores[i] = std::exp(scores[i] - shift);
      block.sums[row] = block.sums[row] * before + sum;
      block.largest[row] = most;
      for (int64_t i = 0; i < size; ++i) block.result[row * size + i] *= before;
    }
    hw_cpu_multiply(block.scores.data(), false, block.v.data(), false, block.result.data(), rows, size, block.columns, 1, 1);
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < size; ++i) block.result[row * size + i] /= std::max(block.sums[row], 1.f);  // the largest is exp(0)
    if (p.lse) p.lse[(block.batch * p.heads + head) * p.rows + first + row] = block.largest[row] + std::log(block.sums[row]);
  }
  store<T>(p.o, head, first, rows, size, block.result);
}

// --- the backward pass

template <class T>
void load_queries(const AttentionKernel& p) {
  load<T>(block.q, p.q, block.head, block.row, block.rows, p.size);
  load<T>(block.o, p.o, block.head, block.row, block.rows, p.value_size);
  load<T>(block.o_gradient, p.o_gradient, block.head, block.row, block.rows, p.value_size);
  block.sums.assign(block.rows, 0.f);
  for (int64_t i = 0; i < block.rows * p.value_size; ++i) block.sums[i / p.value_size] += block.o[i] * block.o_gradient[i];
}

// Scores become what weighs the values, and changes are the gradient of the scores.
template <class T>
void differentiate_scores(const AttentionKernel& p, const Sight& sight) {
  const int64_t rows = block.rows, columns = block.columns;
  score<T>(p, sight);
  block.changes.resize(rows * columns);
  hw_cpu_multiply(block.o_gradient.data(), false, block.v.data(), true, block.changes.data(), rows, columns, p.value_size, 1, 0);
  const float* const lse = p.lse + (block.batch * p.heads + block.head) * p.rows + block.row;
  for (int64_t i = 0; i < rows * columns; ++i) {
    float &weight = block.scores[i], &change = block.changes[i];
    const bool sees = weight != kNone;
    weight = sees ? std::exp(weight - lse[i / columns]) : 0;
    change = sees ? weight * (change - block.sums[i / columns]) : 0;
  }
}

template <class T>
void differentiate_queries(const AttentionKernel& p, int64_t head, int64_t first) {
  const Sight sight(p, block.batch);
  block.row = first, block.rows = std::min(kRows, p.rows - first);
  load_queries<T>(p);
  block.result.assign(block.rows * p.size, 0.f);
  const int64_t end = sight.of(first + block.rows - 1).end;
  for (block.column = sight.of(first).begin; block.column < end; block.column += kColumns) {
    block.columns = std::min(kColumns, end - block.column);
    load_keys<T>(p);
    differentiate_scores<T>(p, sight);
    hw_cpu_multiply(block.changes.data(), false, block.k.data(), false, block.result.data(), block.rows, p.size, block.columns,
                    p.scale, 1);
  }
  store<T>(p.q_gradient, head, first, block.rows, p.size, block.result);
}

template <class T>
void differentiate_keys(const AttentionKernel& p, int64_t group, int64_t first) {
  const Sight sight(p, block.batch);
  const int64_t count = std::min(kColumns, p.columns - first), heads = p.heads / p.groups;
  block.result.assign(count * p.size, 0.f), block.second.assign(count * p.value_size, 0.f);
  block.column = first, block.columns = std::clamp<int64_t>(sight.length - first, 0, count);  // padding has zeros
  for (block.head = group * heads; block.columns > 0 && block.head < (group + 1) * heads; ++block.head) {
    load_keys<T>(p);
    for (block.row = 0; block.row < p.rows; block.row += kRows) {
      block.rows = std::min(kRows, p.rows - block.row);
      if (sight.of(block.row + block.rows - 1).end <= first || sight.of(block.row).begin >= first + block.columns) continue;
      load_queries<T>(p);
      differentiate_scores<T>(p, sight);
      hw_cpu_multiply(block.changes.data(), true, block.q.data(), false, block.result.data(), block.columns, p.size, block.rows,
                      p.scale, 1);
      hw_cpu_multiply(block.scores.data(), true, block.o_gradient.data(), false, block.second.data(), block.columns, p.value_size,
                      block.rows, 1, 1);
    }
  }
  store<T>(p.k_gradient, group, first, count, p.size, block.result);
  store<T>(p.v_gradient, group, first, count, p.value_size, block.second);
}

// Of some columns of the bias in a row, or in all where they have one in common, the sum over all that they are added to.
template <class T>
void differentiate_bias(const AttentionKernel& p, int64_t head, int64_t first) {
  const BiasGradient& bias = p.bias_gradient;
  const auto ends = [](int64_t own, int64_t count, int64_t all) { return count == 1 ? Span{0, all} : Span{own, own + 1}; };
  const int64_t own_batch = block.batch, rows = std::min(kRows, bias.rows - first);
  const Span batches = ends(own_batch, bias.batch, p.batch), heads = ends(head, bias.heads, p.heads);
  const int64_t end = bias.rows == 1 ? p.rows : std::min(first + kRows, p.rows);
  Floats& sums = block.second;
  for (block.column = 0; block.column < p.columns; block.column += kColumns) {
    block.columns = std::min(kColumns, p.columns - block.column);
    sums.assign(rows * block.columns, 0.f);
    for (block.batch = batches.begin; block.batch < batches.end; ++block.batch) {
      const Sight sight(p, block.batch);
      for (block.head = heads.begin; block.head < heads.end; ++block.head) {
        load_keys<T>(p);
        for (block.row = first; block.row < end; block.row += kRows) {
          block.rows = std::min(kRows, end - block.row);
          load_queries<T>(p);
          differentiate_scores<T>(p, sight);
          const auto count = static_cast<int64_t>(sums.size());
          for (int64_t i = 0; i < block.rows * block.columns; ++i) sums[i % count] += block.changes[i];
        }
      }
    }
    block.batch = own_batch;
    store<T>(bias.at, head, first, rows, block.columns, sums, block.column);
  }
}

// Calls `of` for each block of so many rows of every head, on idle workers, too.
template <class Of>
void in_blocks(int64_t batch, int64_t heads, int64_t rows, int64_t each, const Of& of) {
  const int64_t blocks = ceil_div(rows, each);
  const auto one = [&](int64_t i) {
    block.batch = i / blocks / heads, block.head = i / blocks % heads;
    of(block.head, i % blocks * each);
  };
  const auto run = [](void* closure, size_t i) { (*static_cast<decltype(one)*>(closure))(static_cast<int64_t>(i)); };
  hw_cpu_split(batch * heads * blocks, run, const_cast<void*>(static_cast<const void*>(&one)));
}

// What a call reads and writes.
struct Touched {
  std::vector<hw_cpu_range> ranges;

  template <class T, class Memory>
  void add(const HeadsAt<Memory>& x, int64_t batch, int64_t heads, int64_t rows, int64_t size, bool write = false) {
    if (!x.base) return;
    const auto once = [](int64_t count, int64_t stride) { return stride ? count : std::min<int64_t>(count, 1); };
    rows = once(rows, x.row_stride);
    for (block.batch = 0; block.batch < once(batch, x.batch_stride); ++block.batch) {
      for (int64_t head = 0; head < once(heads, x.head_stride); ++head) {
        ranges.push_back({at<T>(x, head, 0), size * sizeof(T), static_cast<size_t>(rows), x.row_stride * sizeof(T), write});
      }
    }
  }
  template <class T>
  void add(const T* first, int64_t count, bool write = false) {
    if (first) ranges.push_back({first, count * sizeof(T), 1, 0, write});
  }
};

template <class T>
struct OnCpu : PlannedAttention {
  using PlannedAttention::PlannedAttention;

  cudaError_t attend(const AttentionKernel& p, cudaStream_t stream) const override {
    Touched touched = reads(p);
    touched.template add<T>(p.o, p.batch, p.heads, p.rows, p.value_size, true);
    touched.add(p.lse, p.batch * p.heads * p.rows, true);
    const auto run = [](void* closure) {
      const auto& p = *static_cast<const AttentionKernel*>(closure);
      in_blocks(p.batch, p.heads, p.rows, kRows, [&](int64_t head, int64_t first) { hw::attend<T>(p, head, first); });
    };
    return launch("attention", stream, run, p, touched, 3);
  }

  cudaError_t differentiate(const AttentionKernel& p, cudaStream_t stream) const override {
    const BiasGradient& bias = p.bias_gradient;
    Touched touched = reads(p);
    touched.template add<T>(p.o, p.batch, p.heads, p.rows, p.value_size);
    touched.template add<T>(p.o_gradient, p.batch, p.heads, p.rows, p.value_size);
    touched.add(p.lse, p.batch * p.heads * p.rows);
    touched.template add<T>(p.q_gradient, p.batch, p.heads, p.rows, p.size, true);
    touched.template add<T>(p.k_gradient, p.batch, p.groups, p.columns, p.size, true);
    touched.template add<T>(p.v_gradient, p.batch, p.groups, p.columns, p.value_size, true);
    touched.template add<T>(bias.at, bias.batch, bias.heads, bias.rows, p.columns, true);
    const auto run = [](void* closure) {
      const auto& p = *static_cast<const AttentionKernel*>(closure);
      const BiasGradient& bias = p.bias_gradient;
      in_blocks(p.batch, p.heads, p.rows, kRows, [&](int64_t head, int64_t first) { differentiate_queries<T>(p, head, first); });
      in_blocks(p.batch, p.groups, p.columns, kColumns,
                [&](int64_t group, int64_t first) { differentiate_keys<T>(p, group, first); });
      if (bias.at.base)
        in_blocks(bias.batch, bias.heads, bias.rows, kRows,
                  [&](int64_t head, int64_t first) { differentiate_bias<T>(p, head, first); });
    };
    return launch("attention backward", stream, run, p, touched, 6);
  }

 private:
  static Touched reads(const AttentionKernel& p) {
    Touched touched;
    touched.add<T>(p.q, p.batch, p.heads, p.rows, p.size);
    touched.add<T>(p.k, p.batch, p.groups, p.columns, p.size);
    touched.add<T>(p.v, p.batch, p.groups, p.columns, p.value_size);
    touched.add<T>(p.bias, p.batch, p.heads, p.rows, p.columns);
    touched.add(p.lengths, p.batch);
    touched.add(p.offsets, p.batch * (p.sequences + 1));
    return touched;
  }
  static cudaError_t launch(const char* name, cudaStream_t stream, void (*run)(void*), const AttentionKernel& p,
                            const Touched& touched, int subject) {
    const auto count = static_cast<int>(touched.ranges.size());
    return hw_cpu_launch(name, stream, run, &p, sizeof p, touched.ranges.data(), count, subject);
  }
};

}  // namespace

std::shared_ptr<const PlannedAttention> Attentions::Plans::make(const AttentionProblem& problem) const {
  if (dtype == CUDA_R_16F) return std::make_shared<const OnCpu<f16>>(problem, options);
  if (dtype == CUDA_R_16BF) return std::make_shared<const OnCpu<bf16>>(problem, options);
  return std::make_shared<const OnCpu<float>>(problem, options);
}

}  // namespace hw
