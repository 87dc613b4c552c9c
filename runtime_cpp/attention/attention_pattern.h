// Op graphs that cuDNN recognises as attention and its backward pass.
#pragma once
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "attention_plans.h"
#include "cudnn_graph.h"

namespace hw {

inline Dims dims_of(const Heads& x) { return {x.batch, x.heads, x.rows, x.size}; }
constexpr int64_t kStep = kAlignment / 2;  // kAlignment in 16-bit elements

// A dim of size 1 may have any stride, but cuDNN requires a multiple of kStep.
inline Dims strides_of(const Heads& x) {
  const auto stride_of = [&](int64_t count, int64_t stride) { return count == 1 && stride % kStep ? x.size : stride; };
  return {stride_of(x.batch, x.batch_stride), stride_of(x.heads, x.head_stride), stride_of(x.rows, x.row_stride), 1};
}

// Ids of the operands of a call.
enum Operand : int64_t { kQ = 1, kK, kV, kO, kLse, kOutGradient, kQGradient, kKGradient, kVGradient, kLengths, kBias };

using Added = std::vector<std::pair<cudnnPointwiseMode_t, Value>>;

inline Value index(Graph& graph, const Value& scores, int64_t axis) {
  return graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, scores, {}, {}, CUDNN_DATA_FLOAT, axis);
}
inline Value compare(Graph& graph, cudnnPointwiseMode_t comparison, const Value& left, const Value& right) {
  return graph.pointwise(comparison, CUDNN_DATA_BOOLEAN, left, right, {}, CUDNN_DATA_BOOLEAN);
}
inline Value where(Graph& graph, const Value& sees, const Value& scores) {
  return graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, graph.number(-INFINITY), sees);
}

// Masked scores: -inf if the row does not attend to the column. cuDNN requires exactly these ops.
inline Value seen(Graph& graph, const Value& scores, cudnnPointwiseMode_t comparison, bool of_rows, const Added& added) {
  const Value row = index(graph, scores, 2), column = index(graph, scores, 3);
  Value left = of_rows ? row : column;
  for (const auto& [mode, term] : added) left = graph.pointwise(mode, term.type, left, term, {}, term.type, 3);
  return where(graph, compare(graph, comparison, left, of_rows ? column : row), scores);
}

inline Value not_padded(Graph& graph, const Value& scores, const Value& rows, const Value& columns) {
  const Value row = index(graph, scores, 2), column = index(graph, scores, 3);
  const Value is_row = compare(graph, CUDNN_POINTWISE_CMP_LT, row, rows);
  const Value is_column = compare(graph, CUDNN_POINTWISE_CMP_LT, column, columns);
  return where(graph, compare(graph, CUDNN_POINTWISE_LOGICAL_AND, is_row, is_column), scores);
}

// Op graph of one problem, forward or backward.
class Pattern {
 public:
  Pattern(Graph& graph, const AttentionProblem& problem, cudnnDataType_t type, const AttentionOptions& options, int64_t lse_rows)
      : graph_(graph), problem_(problem), type_(type), options_(options), lse_rows_(lse_rows) {
    const int64_t batch = problem.q.batch, heads = problem.q.heads, rows = problem.q.rows;
    scores_ = {batch, heads, rows, problem.k.rows}, of_rows_ = {batch, heads, rows, 1};
    if (options.has_lengths || options.is_packed) rows_ = graph.own(CUDNN_DATA_INT32, {batch, 1, 1, 1});
    if (options.has_lengths) lengths_ = graph.tensor(kLengths, CUDNN_DATA_INT32, {batch, 1, 1, 1}, {1, 1, 1, 1});
    if (options.is_packed) lengths_ = graph.own(CUDNN_DATA_INT32, {batch, 1, 1, 1});
    q_ = of(kQ, problem.q);
  }

  // Ids of the tensors that hold the numbers of rows and of columns per batch element.
  int64_t counted() const { return rows_.number; }
  int64_t ends() const { return lengths_.number; }

  // Starts of packed sequences in an operand, and the strides from which the starts are computed.
  struct Offsets {
    Value value;
    int64_t batch_stride, row_stride;
  };
  const std::map<int64_t, Offsets>& offsets() const { return offsets_; }

  void forward() {
    const Value scores = masked(biased(scaled(scores_of(of(kK, problem_.k, true)))));
    const Value largest = graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores);
    const Value powers = exp_of(minus(scores, largest));
    const Value sums = graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, powers);
    const Value logarithms = graph_.pointwise(CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sums);
    // cuDNN needs this sum even if the caller requests no log-sum-exps.
    const Value lse = options_.has_lse ? lse_of() : graph_.between(CUDNN_DATA_FLOAT, of_rows_);
    graph_.pointwise_to(lse, CUDNN_POINTWISE_ADD, largest, logarithms);
    const Value weights = graph_.pointwise(CUDNN_POINTWISE_DIV, type_, powers, sums);
    graph_.matmul(weights, of(kV, problem_.v), of(kO, problem_.o), {.m = rows_, .k = lengths_});
  }

  // p = exp(scores - lse). Gradient of the scores = p * (gradient of p - rowsum(o * gradient of o)).
  void backward() {
    const Gradients& gradients = *problem_.gradients;
    const Value given = of(kOutGradient, gradients.o), k = of(kK, problem_.k, true);
    const Value both = graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, given, of(kO, problem_.o));
    const Value sums = own(kLse, of_rows_, of_lse());
    graph_.pointwise_to(sums, CUDNN_POINTWISE_MUL, graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, both), graph_.number(1.f));

    const Value weights = exp_of(masked(minus(biased(scaled(scores_of(k))), lse_of())));
    to_columns(weights, given, kVGradient, gradients.v);

    const Value products = graph_.between(CUDNN_DATA_FLOAT, scores_);
    graph_.matmul(given, of(kV, problem_.v, true), products, {.m = rows_, .n = lengths_});
    const Value changes = scaled(graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, minus(products, sums), weights));
    to_columns(changes, q_, kKGradient, gradients.k);

    const Value keys = graph_.between(type_, dims_of(problem_.k), strides(problem_.k), offsets(kK, problem_.k));
    graph_.reshape(k, keys);
    const Value total = own(kQGradient, dims_of(problem_.q), gradients.q);
    graph_.matmul(changes, keys, total, {.m = rows_, .k = lengths_});
    graph_.pointwise_to(of(kQGradient, gradients.q), CUDNN_POINTWISE_IDENTITY, total);
  }

 private:
  Value of(int64_t name, const Heads& x, bool is_turned = false) {
    return is_turned ? graph_.tensor(name, type_, turned(dims_of(x)), turned(strides(x)), offsets(name, x))
                     : graph_.tensor(name, type_, dims_of(x), strides(x), offsets(name, x));
  }
  Heads of_lse() const {
    const int64_t heads = of_rows_[1];
    return {of_rows_[0], heads, of_rows_[2], 1, heads * lse_rows_, lse_rows_, 1};
  }
  Value lse_of() { return graph_.tensor(kLse, CUDNN_DATA_FLOAT, of_rows_, strides(of_lse()), offsets(kLse, of_lse())); }

  // With packed sequences, cuDNN uses the starts of the sequences instead of the batch stride.
  Dims strides(const Heads& x) const {
    Dims result = strides_of(x);
    if (options_.is_packed) result[0] = std::max(x.heads * x.head_stride, x.rows * x.row_stride);
    return result;
  }
  Value offsets(int64_t name, const Heads& x) {
    if (!options_.is_packed) return {};
    auto found = offsets_.find(name);
    if (found == offsets_.end()) {
      const Value made = graph_.own(CUDNN_DATA_INT32, {scores_[0] + 1, 1, 1, 1});
      found = offsets_.emplace(name, Offsets{made, x.batch_stride, x.row_stride}).first;
    }
    return found->second.value;
  }
  // f32 tensor in memory of the plan. Packed sequences start at the same offsets as in operand x.
  Value own(int64_t name, const Dims& dims, const Heads& x) {
    if (!options_.is_packed) return graph_.own(CUDNN_DATA_FLOAT, dims);
    return graph_.own(CUDNN_DATA_FLOAT, dims, strides(x), extent(x), offsets(name, x));
  }
  // Extent in elements of an operand that holds all sequences.
  int64_t extent(const Heads& x) const {
    const int64_t batches = x.batch / std::max<int64_t>(problem_.sequences, 1);
    return (batches - 1) * x.batch_stride + (x.heads - 1) * x.head_stride + (x.rows - 1) * x.row_stride + x.size;
  }

  Value scores_of(const Value& turned_keys) {
    const Value scores = graph_.between(CUDNN_DATA_FLOAT, scores_);
    graph_.matmul(q_, turned_keys, scores, {.m = rows_, .n = lengths_, .padded = lengths_ && !problem_.gradients});
    return scores;
  }
  Value scaled(const Value& scores) {
    const Value scale = graph_.number(static_cast<float>(options_.scale));
    return graph_.pointwise(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, scores, scale);
  }
  Value biased(const Value& scores) {
    if (!options_.has_bias) return scores;
    const Heads& x = problem_.bias;  // The strides of broadcast dims are 0.
    const Value bias = graph_.tensor(kBias, type_, {x.batch, x.heads, scores_[2], scores_[3]}, strides_of(x));
    return graph_.pointwise(CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, scores, bias);
  }
  Value minus(const Value& x, const Value& of_rows) {
    return graph_.pointwise(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, x, of_rows);
  }
  Value exp_of(const Value& x) { return graph_.pointwise(CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT, x); }

  // Multiplies transposed scores by x, and sums over the heads of a group.
  void to_columns(const Value& scores, const Value& x, int64_t name, const Heads& of_result) {
    const int64_t batch = scores_[0], heads = scores_[1], group = heads / of_result.heads;
    const Value result = of(name, of_result);
    const Value of_columns = graph_.between(type_, turned(scores_), turned(row_major(scores_)));
    graph_.reshape(scores, of_columns);
    const Ends ends{.m = lengths_, .k = rows_};
    if (result.dims[1] == heads) return graph_.matmul(of_columns, x, result, ends);
    const Dims dims{batch, heads, scores_[3], x.dims[3]};
    Heads each = of_result;  // cuDNN multiplies the starts by the number of heads in the group.
    each.heads = heads, each.batch_stride *= group, each.row_stride *= group;
    if (of_result.heads == 1) each.head_stride = of_result.size;
    const Value of_heads = options_.is_packed ? graph_.own(type_, dims, strides(each), extent(each), offsets(name, of_result))
                                              : graph_.between(type_, dims);
    graph_.matmul(of_columns, x, of_heads, ends);
    graph_.reduce_to(result, CUDNN_REDUCE_TENSOR_ADD, of_heads);
  }

  // Applies lengths, the diagonal and the window. cuDNN recognises only diagonals that contain a corner of the scores.
  Value masked(Value scores) {
    const int64_t diagonal = problem_.diagonal, count = scores_[2];
    const auto integer = [&](int64_t value) { return graph_.number(static_cast<int32_t>(value)); };
    if (lengths_) scores = not_padded(graph_, scores, rows_, lengths_);
    const bool one_sees_all = count == 1 && (options_.from_end || !lengths_);
    if (options_.causal && !one_sees_all) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, lengths_}, {CUDNN_POINTWISE_SUB, rows_}};
      } else if (diagonal) {
        added = {{CUDNN_POINTWISE_ADD, integer(count + diagonal)}, {CUDNN_POINTWISE_SUB, integer(count)}};
      }
      scores = seen(graph_, scores, CUDNN_POINTWISE_CMP_GE, true, added);
    }
    if (options_.window) {
      Added added;
      if (options_.from_end) {
        added = {{CUDNN_POINTWISE_ADD, integer(options_.window)}, {CUDNN_POINTWISE_SUB, lengths_}, {CUDNN_POINTWISE_ADD, rows_}};
      } else {
        added = {{CUDNN_POINTWISE_ADD, graph_.number(static_cast<float>(options_.window - diagonal))}};
      }
      scores = seen(graph_, scores, CUDNN_POINTWISE_CMP_GT, false, added);
    }
    return scores;
  }

  Graph& graph_;
  const AttentionProblem& problem_;
  cudnnDataType_t type_;
  const AttentionOptions& options_;
  const int64_t lse_rows_;  // rows of the log-sum-exps; the problem may have fewer
  Dims scores_{}, of_rows_{};
  Value q_, rows_, lengths_;  // rows_ and lengths_ are set only for lengths or packed sequences
  std::map<int64_t, Offsets> offsets_;
};

}  // namespace hw
