// Thread blocks that run together.
#pragma once

namespace hw {

#ifdef __CUDACC__

// The thread blocks of a cluster, which read each other's shared memory. Before compute capability 9.0 it is one block.
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
  // What the threads of all have written, in any memory, they can read then.
  __device__ static void meet() {
    if (size() == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  // What another block has where an element of shared memory lies here.
  template <class T>
  __device__ static T of(int rank, const T& here) {
    static_assert(sizeof(T) == 4);
    unsigned there, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&here))), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
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

#endif

}  // namespace hw
