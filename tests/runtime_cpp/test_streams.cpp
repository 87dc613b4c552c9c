// Streams, events, memory and schedules of the CPU device.
#include <chrono>
#include <cmath>

#include "testing.h"

using namespace testing;

TEST(wait_binds_to_the_record_at_the_time_of_the_call) {
  on_ranks(1, [](int) {
    const Stream a, b;
    const Event e;
    const Buffer x(1);
    OK(set(x, 1, 1, a));
    OK(cudaEventRecord(e, a));
    OK(cudaStreamWaitEvent(b, e));
    OK(cudaEventRecord(e, b));  // `b` must not wait for this later record.
    EXPECT(fetch<float>(x, 1, b)[0] == 1);
  });
}

TEST(wait_on_an_event_never_recorded_is_no_wait) {
  on_ranks(1, [](int) {
    const Stream s;
    const Event e;
    OK(cudaStreamWaitEvent(s, e));
    OK(cudaEventSynchronize(e));
    EXPECT(cudaEventQuery(e) == cudaSuccess);
    OK(cudaStreamSynchronize(s));
  });
}

TEST(record_again_moves_the_event) {
  on_ranks(1, [](int) {
    const Stream a, b;
    const Event e;
    const Buffer x(1);
    OK(set(x, 1, 1, a));
    OK(cudaEventRecord(e, a));
    OK(set(x, 2, 1, a));
    OK(cudaEventRecord(e, a));
    OK(cudaStreamWaitEvent(b, e));
    EXPECT(fetch<float>(x, 1, b)[0] == 2);
  });
}

TEST(legacy_default_stream_orders_blocking_streams) {
  on_ranks(1, [](int) {
    const Stream before(cudaStreamDefault), after(cudaStreamDefault);
    const Buffer x(1), y(1);
    OK(set(x, 3, 1, before));
    OK(cudaMemcpyAsync(y, x, 4, cudaMemcpyDeviceToDevice, nullptr));  // This waits for `before`.
    EXPECT(fetch<float>(y, 1, after)[0] == 3);                        // `after` waits for the copy.
  });
}

TEST(non_blocking_streams_ignore_the_legacy_stream) {
  configure(config_of(HW_CPU_SEEDED, 1));
  const std::string report = run_ranks(1, [](int) {
    const Stream s(cudaStreamNonBlocking);
    const Buffer x(1);
    OK(set(x, 3, 1, s));
    OK(cudaMemsetAsync(x, 0, 4, nullptr));
    OK(cudaDeviceSynchronize());
  });
  EXPECT_IN("missing dependency", report);
}

TEST(copies_of_pageable_memory_take_it_at_the_call) {
  on_ranks(1, [](int) {
    const Stream s;
    const Buffer x(2);
    {
      float source[2] = {4, 5};
      OK(cudaMemcpyAsync(x, source, 8, cudaMemcpyHostToDevice, s));
      source[0] = source[1] = 0;
    }
    EXPECT(fetch<float>(x, 2, s)[1] == 5);
  });
}

TEST(pinned_copies_stay_asynchronous) {
  on_ranks(1, [](int) {
    const Stream s;
    const Buffer x(1);
    float* pinned;
    OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4));
    OK(set(x, 7, 1, s));
    OK(cudaMemcpyAsync(pinned, x, 4, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    EXPECT(*pinned == 7);
    OK(set(pinned, 8, 1, s));  // A kernel can access pinned memory.
    OK(cudaStreamSynchronize(s));
    EXPECT(*pinned == 8);
    OK(cudaFreeHost(pinned));
  });
}

TEST(two_dimensional_copies) {
  on_ranks(1, [](int) {
    const Stream s;
    const Buffer<unsigned char> x(64), y(64), z(24);
    OK(cudaMemsetAsync(x, 1, 64, s));
    OK(cudaMemsetAsync(z, 2, 24, s));
    OK(cudaMemcpy2DAsync(x + 2, 8, z, 3, 3, 8, cudaMemcpyDeviceToDevice, s));
    OK(cudaMemsetAsync(y, 0, 64, s));
    OK(cudaMemcpy2DAsync(y, 4, x + 1, 8, 4, 8, cudaMemcpyDeviceToDevice, s));
    const auto got = fetch<unsigned char>(y, 32, s);
    for (int row = 0; row < 8; ++row) EXPECT(got[row * 4] == 1 && got[row * 4 + 1] == 2 && got[row * 4 + 3] == 2);
  });
}

TEST(free_synchronises_the_device) {
  on_ranks(1, [](int) {
    const Stream s;
    float *x, *y;
    OK(cudaMalloc(&x, 4));
    OK(cudaMalloc(&y, 4));
    OK(set(x, 9, 1, s));
    OK(cudaMemcpyAsync(y, x, 4, cudaMemcpyDeviceToDevice, s));
    OK(cudaFree(x));
    EXPECT(cudaStreamQuery(s) == cudaSuccess);
    EXPECT(fetch(y, 1, s)[0] == 9);
    OK(cudaFree(y));
  });
}

TEST(fresh_memory_is_nan) {
  on_ranks(1, [](int) {
    for (const std::size_t count : {std::size_t{3}, std::size_t{3} << 20}) {
      const Buffer x(count);
      const Stream s;
      const auto got = fetch<float>(x, count, s);
      EXPECT(std::isnan(got.front()) && std::isnan(got.back()));
    }
  });
}

TEST(fresh_memory_is_fast) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const auto begin = std::chrono::steady_clock::now();
  void* x;
  OK(cudaMalloc(&x, std::size_t{1} << 30));
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  OK(cudaFree(x));
  std::printf("# 1 GiB of NaN in %.1f ms\n", ms);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT(ms < 200);
#endif
}

TEST(sizes_of_zero) {
  on_ranks(1, [](int) {
    const Stream s;
    void* x;
    OK(cudaMalloc(&x, 0));
    EXPECT(x == nullptr);
    OK(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDeviceToDevice, s));
    OK(cudaMemcpy2DAsync(nullptr, 0, nullptr, 0, 0, 5, cudaMemcpyDefault, s));
    OK(cudaMemsetAsync(nullptr, 0, 0, s));
    OK(hw_cpu_launch("nothing", s, [](void*) {}, nullptr, 0, nullptr, 0));
    OK(cudaStreamSynchronize(s));
    OK(cudaFree(nullptr));
  });
}

TEST(polling_makes_progress) {
  on_ranks(2, [](int) {
    const Stream s;
    const Buffer x(1);
    OK(set(x, 1, 1, s));
    cudaError_t state;
    while ((state = cudaStreamQuery(s)) == cudaErrorNotReady) {
    }
    EXPECT(state == cudaSuccess);
  });
}

TEST(time_between_events) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Stream s;
  cudaEvent_t a, b;
  for (cudaEvent_t* event : {&a, &b}) OK(cudaEventCreateWithFlags(event, cudaEventDefault));
  OK(cudaEventRecord(a, s));
  OK(hw_cpu_launch(
      "sleep", s, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, nullptr, 0, nullptr, 0));
  OK(cudaEventRecord(b, s));
  OK(cudaEventSynchronize(b));
  float ms = 0;
  OK(cudaEventElapsedTime(&ms, a, b));
  EXPECT(ms >= 15);
  OK(cudaEventDestroy(a));
  OK(cudaEventDestroy(b));
}

TEST(a_pointer_belongs_to_the_device_of_the_op) {
  configure(config_of(HW_CPU_PARALLEL, 2));
  OK(cudaSetDevice(1));
  const Buffer far(4);
  OK(cudaSetDevice(0));
  const Stream s;
  const Buffer near(4);
  EXPECT(set(far, 1, 4, s) == cudaErrorInvalidValue);
  EXPECT_IN("memory of device 1 in an op of device 0", hw_cpu_last_report());
  EXPECT(set(near, 1, 5, s) == cudaErrorInvalidValue);
  EXPECT_IN("bytes 0 to 20 of an allocation of 16", cudaGetErrorString(cudaErrorInvalidValue));
  OK(cudaMemsetAsync(near, 0, 16, s));
  OK(cudaMemcpyAsync(far, near, 16, cudaMemcpyDeviceToDevice, s));  // Copies between devices are allowed.
  OK(cudaDeviceEnablePeerAccess(1, 0));
  OK(cudaStreamSynchronize(s));
  OK(set(far, 1, 4, s));
  OK(cudaDeviceSynchronize());
}

TEST(what_is_not_supported_says_so) {
  configure(config_of(HW_CPU_PARALLEL, 1));
  const Stream s;
  const auto says_so = [](cudaError_t error) {
    EXPECT(error != cudaSuccess);
    EXPECT_IN("not supported by the CPU device", cudaGetErrorString(error));
  };
  says_so(cudaMemsetAsync(nullptr, 0, 0, cudaStreamPerThread));
  says_so(cudaStreamSynchronize(cudaStreamPerThread));
  says_so(cudaLaunchHostFunc(s, [](void*) {}, nullptr));
  cudaEvent_t e;
  says_so(cudaEventCreateWithFlags(&e, cudaEventInterprocess | cudaEventDisableTiming));
  cudaStream_t gone;
  OK(cudaStreamCreateWithFlags(&gone, cudaStreamDefault));
  OK(cudaStreamDestroy(gone));
  says_so(cudaMemsetAsync(nullptr, 0, 0, gone));
  cublasLtMatmulDesc_t desc;
  OK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const float scale = 1;
  const float* pointer = &scale;
  const auto scale_of_d = static_cast<cublasLtMatmulDescAttributes_t>(20);  // CUBLASLT_MATMUL_DESC_D_SCALE_POINTER
  const cublasStatus_t status = cublasLtMatmulDescSetAttribute(desc, scale_of_d, &pointer, sizeof pointer);
  EXPECT(status == CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_IN("not supported by the CPU device", cublasLtGetStatusString(status));
  OK(cublasLtMatmulDescDestroy(desc));
  EXPECT(cudaGetLastError() != cudaSuccess);
  EXPECT(cudaGetLastError() == cudaSuccess);
}

TEST(destroyed_streams_finish_their_work) {
  on_ranks(1, [](int) {
    const Buffer x(1);
    const Event e;
    {
      const Stream s;
      OK(set(x, 6, 1, s));
      OK(cudaEventRecord(e, s));
    }
    const Stream t;
    OK(cudaStreamWaitEvent(t, e));
    EXPECT(fetch<float>(x, 1, t)[0] == 6);
  });
}

TEST(a_missing_wait_is_reported_whatever_the_schedule) {
  for (int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    for (int seed = 0; seed < 10; ++seed) {
      hw_cpu_config config = config_of(mode, 1, seed);
      config.check_dependencies = 1;
      configure(config);
      const std::string error = run_ranks(1, [](int) {
        const Stream a, b;
        const Buffer x(8), y(8);
        OK(set(x, 1, 8, a));
        OK(cudaMemcpyAsync(y, x + 4, 4, cudaMemcpyDeviceToDevice, b));
        OK(cudaDeviceSynchronize());
      });
      EXPECT_IN("missing dependency", error);
      EXPECT_IN("rank 0 stream 1: set x (test_streams.cpp:", error);
      EXPECT_IN("rank 0 stream 2: copy y (test_streams.cpp:", error);
      EXPECT(hw_cpu_failed());
    }
  }
}

TEST(a_race_on_pinned_memory_is_reported_as_of_the_host) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.check_dependencies = 1;
  configure(config);
  const std::string error = run_ranks(1, [](int) {
    const Stream a, b;
    float* pinned;
    OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4));
    OK(set(pinned, 1, 1, a));
    OK(set(pinned, 2, 1, b));
    OK(cudaDeviceSynchronize());
  });
  EXPECT_IN("which writes bytes 0 to 4 of an allocation of 4 bytes of the host", error);
}

TEST(neighbouring_bytes_do_not_conflict) {
  on_ranks(1, [](int) {
    const Stream a, b;
    const Buffer<unsigned char> x(64), y(64), z(64);
    OK(cudaMemcpy2DAsync(x, 8, y, 4, 4, 8, cudaMemcpyDeviceToDevice, a));      // This writes the left half of every row.
    OK(cudaMemcpy2DAsync(x + 4, 8, z, 4, 4, 8, cudaMemcpyDeviceToDevice, b));  // This writes the right half of every row.
    OK(cudaDeviceSynchronize());
  });
}

TEST(the_same_seed_gives_the_same_schedule) {
  const auto schedule = [](std::uint64_t seed) {
    configure(config_of(HW_CPU_SEEDED, 3, seed));
    const std::string error = run_ranks(3, [](int) {
      const Stream a, b;
      const Buffer x(4), y(4);
      for (int i = 0; i < 5; ++i) {
        OK(set(x, i, 4, a));
        OK(set(y, i, 4, b));
      }
      EXPECT(hw_cpu_barrier(3) == 0);
      OK(cudaDeviceSynchronize());
    });
    EXPECT(error.empty());
    hw_cpu_counters counters;
    hw_cpu_get_counters(&counters);
    EXPECT(counters.ops == 30);
    return counters.schedule;
  };
  EXPECT(schedule(5) == schedule(5));
  EXPECT(schedule(5) != schedule(6));
}

TEST(a_rank_that_blocks_outside_the_device_is_named) {
  hw_cpu_config config = config_of(HW_CPU_SEEDED, 2, 1);
  config.timeout_seconds = 0.3;
  config.picker = HW_CPU_HOSTS;
  configure(config);
  const std::string error = run_ranks(2, [](int r) {
    for (int i = 0; r == 0 && i < 100 && !hw_cpu_failed(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    OK(cudaDeviceSynchronize());
    EXPECT(hw_cpu_barrier(2) == 0);
  });
  EXPECT_IN("rank 0 has the turn, but has not called the device", error);
}

TEST(an_exception_in_one_piece_of_a_kernel_is_the_error_of_the_kernel) {
  hw_cpu_config config = config_of(HW_CPU_PARALLEL, 1);
  config.workers = 4;
  for (int i = 0; i < 20; ++i) {
    configure(config);
    const std::string error = run_ranks(1, [](int) {
      const Stream stream;
      const auto kernel = [](void*) {
        hw_cpu_split(64, [](void*, std::size_t piece) { piece == 3 ? throw Failure("piece 3 has failed") : void(); }, nullptr);
      };
      OK(hw_cpu_launch("split", stream, kernel, nullptr, 0, nullptr, 0));
      OK(cudaStreamSynchronize(stream));
    });
    EXPECT_IN("piece 3 has failed", error);
  }
}
