// Attention on the CPU device. Runs the kernels of attention_kernels.h. Each worker computes one tile at a time.
#include <hostweave_cpu.h>

#include <vector>

#include "attention_plans.h"
#include "hostweave/attention_kernels.h"
#include "hostweave/index.h"
#include "hostweave/types.h"

namespace hw {

const AttentionKernels attention_f32_64{}, attention_f32_128{}, attention_f32_256{};
const AttentionKernels attention_f16_64{}, attention_f16_128{}, attention_f16_256{};
const AttentionKernels attention_bf16_64{}, attention_bf16_128{}, attention_bf16_256{};

namespace {

using Kernel = void (*)(const AttentionKernel&, int64_t block);

// Runs the thread blocks on this thread and on idle workers.
void run_blocks(Kernel kernel, const AttentionKernel& p, int64_t blocks) {
  const auto block = [&](int64_t i) { kernel(p, i); };
  const auto run = [](void* closure, size_t i) { (*static_cast<decltype(block)*>(closure))(static_cast<int64_t>(i)); };
  hw_cpu_split(blocks, run, const_cast<void*>(static_cast<const void*>(&block)));
}

int64_t blocks_of(int64_t batch, int64_t heads, int64_t rows) { return batch * heads * ceil_div(rows, kAttentionTile); }

// Memory that a call reads or writes.
struct Touched {
  std::vector<hw_cpu_range> ranges;

  template <class T, class Memory>
  void add(const HeadsAt<Memory>& x, int64_t batch, int64_t heads, int64_t rows, int64_t size, bool write = false) {
    if (!x.base) return;
    const auto once = [](int64_t count, int64_t stride) { return stride ? count : std::min<int64_t>(count, 1); };
    rows = once(rows, x.row_stride);
    for (int64_t i = 0; i < once(batch, x.batch_stride); ++i) {
      for (int64_t head = 0; head < once(heads, x.head_stride); ++head) {
        const T* const first = static_cast<const T*>(x.base) + at(x, i, head);
        ranges.push_back({first, size * sizeof(T), static_cast<size_t>(rows), x.row_stride * sizeof(T), write});
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
      run_blocks(hw::attend<T, kMostHead>, p, blocks_of(p.batch, p.heads, p.rows));
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
      run_blocks(differentiate_queries<T, kMostHead>, p, blocks_of(p.batch, p.heads, p.rows));
      run_blocks(differentiate_keys<T, kMostHead>, p, blocks_of(p.batch, p.groups, p.columns));
      if (!bias.at.base) return;
      const int64_t tiles = ceil_div(p.columns, kAttentionTile);
      run_blocks(differentiate_bias<T>, p, blocks_of(bias.batch, bias.heads, bias.rows) * tiles);
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
