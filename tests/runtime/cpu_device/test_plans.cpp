// Plans of attention, as programs use them.
#include <memory>

#include "hostweave/attention.h"
#include "testing.h"

using namespace testing;

namespace {

struct Plans : hw::Attentions {
  using Attentions::Attentions;

  // The plan that a call on the stream uses, for so many rows.
  std::weak_ptr<const Plan> plan_of(int64_t rows, cudaStream_t stream) {
    const hw::Heads x{.rows = rows, .size = 8, .row_stride = 8};
    prepare_for({x, x, x, x, 0, std::nullopt});
    return plan_for(stream);
  }
};

}  // namespace

TEST(a_plan_that_a_graph_uses_is_not_evicted) {
  on_ranks(1, [](int) {
    hw::Rank rank(0, 0, 1);
    Plans plans(rank, CUDA_R_32F, {});
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

int main(int argc, char** argv) { return testing::main(argc, argv); }
