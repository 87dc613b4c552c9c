// Cooperating thread blocks: clusters and cooperative grids.
#pragma once
#include <cstdint>

namespace hw {

#ifdef __CUDACC__

// Thread block cluster with distributed shared memory. Before compute capability 9.0, a cluster is one block.
struct Cluster {
#if __CUDA_ARCH__ >= 900
  __device__ static int rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
  __device__ static int size() {
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
  }
  // Barrier for all threads of the cluster. Makes the writes of each thread visible to all threads.
  __device__ static void meet() {
    if (size() == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    wait();
  }
  // arrive and wait are the two parts of a barrier. This barrier does not order memory: after `wait`, a thread may miss writes of
  // other threads that precede `arrive`.
  __device__ static void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
  __device__ static void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
  // Address of the variable `here` of block `rank`. The variable is in shared memory.
  template <class T>
  __device__ static unsigned address(int rank, const T& here) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&here))), "r"(rank));
    return there;
  }
  // `give` writes `value` to the variable `here` of block `rank`. `of` reads the variable.
  template <class T>
  __device__ static void give(int rank, const T& here, T value) {
    struct Words {
      unsigned words[sizeof(T) / 4];
    };
    const auto from = __builtin_bit_cast(Words, value);
    const unsigned to = address(rank, here);
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; ++i)
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(from.words[i]) : "memory");
  }
  template <class T>
  __device__ static T of(int rank, const T& here) {
    static_assert(sizeof(T) == 4);
    unsigned value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address(rank, here)) : "memory");
    return __builtin_bit_cast(T, value);
  }
#else
  __device__ static int rank() { return 0; }
  __device__ static int size() { return 1; }
  __device__ static void meet() { __syncthreads(); }
  template <class T>
  __device__ static T of(int, const T& here) {
    return here;
  }
#endif
};

// Thread blocks that process a row together: a cluster, or a whole cooperative grid.
struct Team {
  __device__ static bool is_grid() { return gridDim.y > 1; }
  __device__ static int rank() { return is_grid() ? blockIdx.y : Cluster::rank(); }
  __device__ static int size() { return is_grid() ? gridDim.y : Cluster::size(); }
  // Barrier like Cluster::meet. All blocks together add 2^31 to the counter. So the top bit flips when the last block arrives.
  __device__ static void meet() {
    if (!is_grid()) return Cluster::meet();
    unsigned* const arrived = counter();
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      const unsigned before = atomicAdd(arrived, blockIdx.y == 0 ? 0x80000000u - (gridDim.y - 1) : 1u);
      while (((before ^ *static_cast<volatile unsigned*>(arrived)) & 0x80000000u) == 0) {
      }
      __threadfence();
    }
    __syncthreads();
  }

 private:
  // Address of the driver's barrier counter of a cooperative grid, computed as in cooperative_groups.h. NVRTC cannot compile that
  // header without the CUDA toolkit.
  __device__ static unsigned* counter() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    return reinterpret_cast<unsigned*>(uint64_t{high} << 32 | low) + 1;
  }
};

#endif

}  // namespace hw
