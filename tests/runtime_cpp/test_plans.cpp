// Plans of attention, and the order of calls, as programs use them.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "attention_plans.h"
#include "hostweave/errors.h"
#include "hostweave/grouped.h"
#include "hostweave/streams.h"
#include "testing.h"

using namespace testing;

namespace {

struct OfRows : hw::Attentions {
  using Attentions::Attentions;

  // Returns the attention plan that a call on this stream uses for this number of rows.
  std::weak_ptr<const Plans::Plan> plan_of(int64_t rows, cudaStream_t stream) {
    const hw::Heads x{.rows = rows, .size = 8, .row_stride = 8};
    plans_->prepare({x, x, x, x, 0, std::nullopt});
    return plans_->on(stream);
  }
};

}  // namespace

TEST(a_plan_that_a_graph_uses_is_not_evicted) {
  on_ranks(1, [](int) {
    hw::Rank rank(0, 0, 1);
    OfRows plans(rank, CUDA_R_32F, {});
    const Stream stream;
    const auto called = plans.plan_of(1, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const auto captured = plans.plan_of(2, stream);
    cudaGraph_t graph = nullptr;
    OK(cudaStreamEndCapture(stream, &graph));
    for (int64_t rows = 3; rows < 400; ++rows) plans.plan_of(rows, stream);
    EXPECT(called.expired() && !captured.expired());
    OK(cudaGraphDestroy(graph));
  });
}

TEST(a_grouped_matmul_names_the_remedy_for_operands_and_results) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  hw::Rank rank(0, 0, 1);
  hw::GroupedPlan plan(rank, CUDA_R_32F, CUDA_R_32F);
  const hw::Strided x{4, 3}, other{2, 3, 5}, across({4, 5}, {1, 4});
  std::string error;
  try {
    plan.prepare(x, other, across);
  } catch (const hw::ExecutionError& caught) {
    error = caught.what();
  }
  EXPECT_IN("the elements of a row are not contiguous: copy the array to or from a contiguous buffer", error);
}

TEST(graphs_of_kernels_leave_their_order_to_who_launches_them) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);  // In seeded mode, a kernel cannot wait for this thread.
  config.workers = 2;
  configure(config);
  const std::string error = run_ranks(1, [](int) {
    static std::atomic<bool> go, done;
    go = done = false;
    const Stream held, launching;
    hw::CallOrder calls;
    OK(cudaStreamBeginCapture(launching, cudaStreamCaptureModeThreadLocal));
    {
      const hw::CallOrder::OfKernels order;
      OK(calls.begin_call(launching));
      OK(hw_cpu_launch("kernel", launching, [](void*) { done = true; }, nullptr, 0, nullptr, 0));
      OK(calls.end_call(launching));
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    OK(cudaStreamEndCapture(launching, &graph));
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(calls.in_graphs());
    const auto wait = [](void*) {
      while (!go) std::this_thread::yield();
    };
    OK(calls.begin_call(held));
    OK(hw_cpu_launch("held", held, wait, nullptr, 0, nullptr, 0));
    OK(calls.end_call(held));
    OK(cudaGraphLaunch(exec, launching));  // This launch waits for no call.
    OK(cudaStreamSynchronize(launching));
    EXPECT(done.exchange(false));
    OK(calls.begin_call(launching));
    OK(cudaGraphLaunch(exec, launching));  // This launch waits for the call on `held`.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT(!done);
    go = true;
    OK(cudaStreamSynchronize(launching));
    EXPECT(done);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
  });
  if (!error.empty()) throw Failure(error);
}
