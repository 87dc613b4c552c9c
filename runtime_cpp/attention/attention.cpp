#include "hostweave/attention.h"

#include <string>

#include "hostweave/errors.h"

namespace hw {
namespace {

Heads heads_of(const Strided& x) {
  const int n = x.shape.ndim;
  Heads result{.heads = x.shape[n - 3], .rows = x.shape[n - 2], .size = x.shape[n - 1]};
  result.head_stride = x.strides[n - 3], result.row_stride = x.strides[n - 2];
  if (n > 3) result.batch = x.shape[0], result.batch_stride = x.strides[0];
  return result;
}

}  // namespace

AttentionPlan::AttentionPlan(Rank& rank, cudaDataType_t dtype, const AttentionOptions& options)
    : rank_(rank), dtype_(dtype), options_(options) {}

void AttentionPlan::prepare(const Strided& q, const Strided& k, const Strided& v, const Strided& o, int64_t diagonal) {
  const AttentionProblem problem{heads_of(q), heads_of(k), heads_of(v), heads_of(o), diagonal};
  current_ = plans_.find(problem, [&]() -> std::shared_ptr<const Plan> {
    if (problem.q.batch == 0 || problem.q.heads == 0 || problem.q.rows == 0 || problem.o.size == 0) return nullptr;
    expect_columns(problem);
    return plan(problem);
  });
}

// A row without any has no softmax.
void AttentionPlan::expect_columns(const AttentionProblem& problem) const {
  const int64_t rows = problem.q.rows, columns = problem.k.rows, diagonal = problem.diagonal;
  const bool last_sees_none = options_.window != 0 && rows - 1 + diagonal - options_.window >= columns - 1;
  if (columns == 0 || (options_.causal && (diagonal < 0 || last_sees_none))) {
    throw ExecutionError("attention: of " + std::to_string(rows) + " rows of the query and " + std::to_string(columns) +
                         " of the key, a row of the query sees none of the key: pass as many rows of the key, or more");
  }
}

}  // namespace hw
