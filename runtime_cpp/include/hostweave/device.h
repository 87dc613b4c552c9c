// Macros for CUDA keywords, also for compilers without CUDA.
#pragma once

#ifdef __CUDACC__
#define HW_DEVICE __device__ inline
#define HW_NOINLINE __device__ __noinline__
#define HW_SHARED __shared__
#define HW_UNROLL _Pragma("unroll")  // unrolls a loop
#else
#define HW_DEVICE inline
#define HW_NOINLINE inline
#define HW_SHARED
#define HW_UNROLL
#endif

// Defines CUDA keywords of user kernels for compilers that lack them.
#ifndef __device__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#endif
