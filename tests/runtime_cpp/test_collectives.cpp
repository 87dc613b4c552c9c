// Communicators, collectives, sends and recvs: data, order, mismatches and deadlocks.
#include <chrono>
#include <cmath>

#include "testing.h"

using namespace testing;

namespace {

ncclUniqueId new_id() {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  return id;
}

// Communicators of devices 0 to count - 1, created by one thread.
void init_all(ncclComm_t* comms, int count) {
  const ncclUniqueId id = new_id();
  OK(ncclGroupStart());
  for (int r = 0; r < count; ++r) {
    OK(cudaSetDevice(r));
    OK(ncclCommInitRank(&comms[r], count, id, r));
  }
  OK(ncclGroupEnd());
}

// Runs body(rank, communicator, stream) on every rank, in every mode.
void with_comm(int ranks, const std::function<void(int, ncclComm_t, cudaStream_t)>& body) {
  in_every_mode(ranks, [&] {
    const ncclUniqueId id = new_id();
    const std::string error = run_ranks(ranks, [&](int r) {
      OK(cudaSetDevice(r));
      const Comm comm(id, ranks, r);
      const Stream stream;
      body(r, comm, stream);
      OK(cudaStreamSynchronize(stream));
    });
    if (!error.empty()) throw Failure(error);
  });
}

void upload(float* to, std::vector<float> from, cudaStream_t stream) {
  OK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
}

// Report of a run that must fail in this mode.
std::string report_of(int mode, int ranks, const std::function<void(int, ncclComm_t)>& body, hw_cpu_config* given = nullptr) {
  configure(given ? *given : config_of(mode, ranks, 2));
  const ncclUniqueId id = new_id();
  run_ranks(ranks, [&](int r) {
    OK(cudaSetDevice(r));
    const Comm comm(id, ranks, r);
    body(r, comm);
    OK(cudaDeviceSynchronize());
  });
  EXPECT(hw_cpu_failed());
  const std::string report = hw_cpu_last_report();
  configure(config_of(HW_CPU_PARALLEL, 8));
  return report;
}

}  // namespace

TEST(all_gather_also_in_place) {
  with_comm(4, [](int r, ncclComm_t comm, cudaStream_t s) {
    const Buffer x(2), y(8), z(8);
    upload(x, {r + 0.f, r + 10.f}, s);
    OK(ncclAllGather(x, y, 2, ncclFloat32, comm, s));
    OK(cudaMemcpyAsync(z + 2 * r, x, 8, cudaMemcpyDeviceToDevice, s));
    OK(ncclAllGather(z + 2 * r, z, 2, ncclFloat32, comm, s));
    const auto got = fetch<float>(y, 8, s);
    for (int i = 0; i < 4; ++i) EXPECT(got[2 * i] == i && got[2 * i + 1] == i + 10);
    EXPECT((fetch<float>(z, 8, s) == got));
  });
}

TEST(all_reduce_of_every_operation) {
  with_comm(3, [](int r, ncclComm_t comm, cudaStream_t s) {
    const float want[] = {6, 6, 3, 1, 2};  // results for 1, 2, 3: sum prod max min avg
    for (int op = 0; op < ncclNumOps; ++op) {
      const Buffer x(5);
      OK(set(x, r + 1, 5, s));
      OK(ncclAllReduce(x, x, 5, ncclFloat32, static_cast<ncclRedOp_t>(op), comm, s));
      for (const float got : fetch<float>(x, 5, s)) EXPECT(got == want[op]);
    }
  });
}

TEST(all_reduce_of_every_type) {
  const struct {
    ncclDataType_t type;
    std::vector<unsigned char> one, three;  // the bytes of 1 and of 3
  } cases[] = {{ncclInt8, {1}, {3}},
               {ncclUint8, {1}, {3}},
               {ncclInt32, {1, 0, 0, 0}, {3, 0, 0, 0}},
               {ncclUint32, {1, 0, 0, 0}, {3, 0, 0, 0}},
               {ncclInt64, {1, 0, 0, 0, 0, 0, 0, 0}, {3, 0, 0, 0, 0, 0, 0, 0}},
               {ncclUint64, {1, 0, 0, 0, 0, 0, 0, 0}, {3, 0, 0, 0, 0, 0, 0, 0}},
               {ncclFloat16, {0, 0x3c}, {0, 0x42}},
               {ncclFloat32, {0, 0, 0x80, 0x3f}, {0, 0, 0x40, 0x40}},
               {ncclFloat64, {0, 0, 0, 0, 0, 0, 0xf0, 0x3f}, {0, 0, 0, 0, 0, 0, 0x08, 0x40}},
               {ncclBfloat16, {0x80, 0x3f}, {0x40, 0x40}},
               {ncclFloat8e4m3, {0x38}, {0x44}},
               {ncclFloat8e5m2, {0x3c}, {0x42}}};
  with_comm(3, [&](int, ncclComm_t comm, cudaStream_t s) {
    for (const auto& c : cases) {
      const Buffer<unsigned char> x(c.one.size());
      OK(cudaMemcpyAsync(x, c.one.data(), c.one.size(), cudaMemcpyHostToDevice, s));
      OK(ncclAllReduce(x, x, 1, c.type, ncclSum, comm, s));
      EXPECT((fetch<unsigned char>(x, c.one.size(), s) == c.three));
    }
  });
}

TEST(narrow_floats_accumulate_in_float) {
  with_comm(4, [](int r, ncclComm_t comm, cudaStream_t s) {
    const Buffer<__nv_bfloat16> x(1);
    const __nv_bfloat16 term = __float2bfloat16(r == 0 ? 256.f : 1.f);  // 256 + 1 is 256 in bf16.
    OK(cudaMemcpyAsync(x, &term, 2, cudaMemcpyHostToDevice, s));
    OK(ncclAllReduce(x, x, 1, ncclBfloat16, ncclSum, comm, s));
    EXPECT(__bfloat162float(fetch<__nv_bfloat16>(x, 1, s)[0]) == 260.f);  // 259 is rounded to even once.
  });
}

TEST(reduce_scatter_broadcast_and_reduce) {
  with_comm(3, [](int r, ncclComm_t comm, cudaStream_t s) {
    const Buffer x(6), y(2), z(2);
    upload(x, {1, 2, 3, 4, 5, 6}, s);
    OK(ncclReduceScatter(x, y, 2, ncclFloat32, ncclSum, comm, s));
    EXPECT((fetch<float>(y, 2, s) == std::vector<float>{3.f * (2 * r + 1), 3.f * (2 * r + 2)}));
    OK(set(z, r, 2, s));
    OK(ncclBroadcast(z, z, 2, ncclFloat32, 1, comm, s));
    EXPECT(fetch<float>(z, 2, s)[1] == 1);
    OK(set(z, r + 1, 2, s));
    OK(ncclReduce(z, z, 2, ncclFloat32, ncclProd, 2, comm, s));
    EXPECT(fetch<float>(z, 2, s)[0] == (r == 2 ? 6 : r + 1));
  });
}

TEST(sends_meet_recvs_in_issue_order) {
  with_comm(2, [](int r, ncclComm_t comm, cudaStream_t s) {
    const Buffer x(1), y(1), got(2);
    OK(set(x, 1, 1, s));
    OK(set(y, 2, 1, s));
    if (r == 0) {
      OK(ncclSend(x, 1, ncclFloat32, 1, comm, s));
      OK(ncclSend(y, 1, ncclFloat32, 1, comm, s));
    } else {
      OK(ncclRecv(got, 1, ncclFloat32, 0, comm, s));
      OK(ncclRecv(got + 1, 1, ncclFloat32, 0, comm, s));
      EXPECT((fetch<float>(got, 2, s) == std::vector<float>{1, 2}));
    }
  });
}

TEST(a_group_is_one_op) {
  with_comm(4, [](int r, ncclComm_t comm, cudaStream_t s) {  // an all-to-all, including self
    const Buffer x(4), y(4);
    upload(x, {r * 4.f, r * 4.f + 1, r * 4.f + 2, r * 4.f + 3}, s);
    OK(ncclGroupStart());
    for (int p = 0; p < 4; ++p) {
      OK(ncclSend(x + p, 1, ncclFloat32, p, comm, s));
      OK(ncclRecv(y + p, 1, ncclFloat32, p, comm, s));
    }
    OK(ncclGroupEnd());
    const auto got = fetch<float>(y, 4, s);
    for (int p = 0; p < 4; ++p) EXPECT(got[p] == p * 4 + r);
  });
}

TEST(collectives_of_nothing) {
  with_comm(2, [](int r, ncclComm_t comm, cudaStream_t s) {
    OK(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, s));
    OK(r == 0 ? ncclSend(nullptr, 0, ncclFloat32, 1, comm, s) : ncclRecv(nullptr, 0, ncclFloat32, 0, comm, s));
  });
}

TEST(one_thread_can_drive_all_devices) {
  in_every_mode(3, [] {
    ncclComm_t comms[3];
    cudaStream_t streams[3];
    float* x[3];
    init_all(comms, 3);
    for (int r = 0; r < 3; ++r) {
      OK(cudaSetDevice(r));
      OK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
      OK(cudaMalloc(&x[r], 4));
      OK(set(x[r], r + 1, 1, streams[r]));
    }
    OK(ncclGroupStart());
    for (int r = 0; r < 3; ++r) OK(ncclAllReduce(x[r], x[r], 1, ncclFloat32, ncclSum, comms[r], streams[r]));
    OK(ncclGroupEnd());
    for (int r = 0; r < 3; ++r) {
      OK(cudaSetDevice(r));
      EXPECT(fetch(x[r], 1, streams[r])[0] == 6);
      OK(cudaFree(x[r]));
      OK(cudaStreamDestroy(streams[r]));
      OK(ncclCommDestroy(comms[r]));
    }
    OK(cudaSetDevice(0));
  });
}

TEST(a_mismatch_names_both_ranks) {
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    const auto report = [&](const std::function<void(int, ncclComm_t, float*)>& body) {
      return report_of(mode, 2, [&](int r, ncclComm_t comm) {
        const Buffer x(16);
        const Stream s;
        OK(cudaMemsetAsync(x, 0, 64, nullptr));
        body(r, comm, x);
      });
    };
    const std::string kinds = report([](int r, ncclComm_t comm, float* h) {
      if (r == 0)
        OK(ncclAllReduce(h, h, 4, ncclFloat32, ncclSum, comm, nullptr));
      else
        OK(ncclBroadcast(h, h, 4, ncclFloat32, 0, comm, nullptr));
    });
    EXPECT_IN("the kinds differ: ", kinds);
    EXPECT_IN("rank 0 stream 0: all_reduce h over communicator ", kinds);
    EXPECT_IN("rank 1 stream 0: broadcast h over communicator ", kinds);
    EXPECT_IN(" (test_collectives.cpp:", kinds);
    EXPECT_IN("the counts differ: ", report([](int r, ncclComm_t comm, float* h) {
                OK(ncclAllReduce(h, h, 4 + r, ncclFloat32, ncclSum, comm, nullptr));
              }));
    EXPECT_IN("the types differ: ", report([](int r, ncclComm_t comm, float* h) {
                OK(ncclAllReduce(h, h, 4, r ? ncclFloat32 : ncclInt32, ncclSum, comm, nullptr));
              }));
    EXPECT_IN("the roots differ: ",
              report([](int r, ncclComm_t comm, float* h) { OK(ncclBroadcast(h, h, 4, ncclFloat32, r, comm, nullptr)); }));
    EXPECT_IN("the reductions differ: ", report([](int r, ncclComm_t comm, float* h) {
                OK(ncclAllReduce(h, h, 4, ncclFloat32, r ? ncclSum : ncclMax, comm, nullptr));
              }));
    EXPECT_IN("the counts differ: ", report([](int r, ncclComm_t comm, float* h) {
                if (r == 0)
                  OK(ncclSend(h, 4, ncclFloat32, 1, comm, nullptr));
                else
                  OK(ncclRecv(h, 5, ncclFloat32, 0, comm, nullptr));
              }));
  }
}

TEST(a_deadlock_is_a_report) {
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    // Ranks 2 and 3 never issue the collective.
    const std::string missing = report_of(mode, 4, [](int r, ncclComm_t comm) {
      const Buffer h(4);
      const Stream s;
      OK(cudaMemsetAsync(h, 0, 16, s));
      if (r < 2) OK(ncclAllReduce(h, h, 4, ncclFloat32, ncclSum, comm, s));
      if (r != 3) OK(cudaStreamSynchronize(s));
    });
    EXPECT_IN("deadlock", missing);
    EXPECT_IN("rank 0 stream 1: all_reduce h over communicator ", missing);
    EXPECT_IN(" (test_collectives.cpp:", missing);
    EXPECT_IN("waits for ranks 2, 3", missing);
  }
}

TEST(sends_outside_a_group_block) {
  const auto exchange = [](int r, ncclComm_t comm) {
    const Buffer x(1), y(1);
    const Stream s;
    OK(set(x, r, 1, s));
    OK(ncclSend(x, 1, ncclFloat32, 1 - r, comm, s));
    OK(ncclRecv(y, 1, ncclFloat32, 1 - r, comm, s));
    OK(cudaStreamSynchronize(s));
  };
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    hw_cpu_config config = config_of(mode, 2, 4);
    config.buffered_sends = 0;
    const std::string report = report_of(mode, 2, exchange, &config);
    EXPECT_IN("rank 0 stream 1: send x over communicator ", report);
    EXPECT_IN("waits for rank 1", report);
    config.buffered_sends = 1;  // With buffering, as in NCCL for small messages, the same program ends.
    configure(config);
    const ncclUniqueId id = new_id();
    const std::string error = run_ranks(2, [&](int r) {
      OK(cudaSetDevice(r));
      const Comm comm(id, 2, r);
      exchange(r, comm);
    });
    EXPECT(error.empty());
  }
}

TEST(ordered_launches_find_deadlocks_across_streams) {
  // The ranks issue two transfers in opposite orders, each on a separate stream. The transfers end if the streams are
  // independent. If a communicator launches in issue order, the ranks wait for each other.
  const auto program = [](int r, ncclComm_t comm) {
    const Buffer a(1), b(1);
    const Stream first, second;
    OK(set(a, 1, 1, first));
    OK(set(b, 1, 1, second));
    if (r == 0) {
      OK(ncclSend(a, 1, ncclFloat32, 1, comm, first));
      OK(ncclRecv(b, 1, ncclFloat32, 1, comm, second));
    } else {
      OK(ncclSend(b, 1, ncclFloat32, 0, comm, second));
      OK(ncclRecv(a, 1, ncclFloat32, 0, comm, first));
    }
    OK(cudaDeviceSynchronize());
  };
  hw_cpu_config config = config_of(HW_CPU_SEEDED, 2, 0);
  config.ordered_launches = 1;
  config.buffered_sends = 0;
  EXPECT_IN("deadlock", report_of(HW_CPU_SEEDED, 2, program, &config));
  config.ordered_launches = 0;
  configure(config);
  const ncclUniqueId id = new_id();
  const std::string error = run_ranks(2, [&](int r) {
    OK(cudaSetDevice(r));
    const Comm comm(id, 2, r);
    program(r, comm);
  });
  EXPECT(error.empty());
}

TEST(communications_over_two_channels_must_be_ordered) {
  // Communications of one channel need no additional order. With `ordered`, an event orders communications of two channels.
  const auto program = [](bool ordered) {
    return [ordered, id = new_id()](int r, ncclComm_t comm) {
      const Comm other(id, 2, r);
      const Buffer a(1), b(1), c(1);
      const Stream first, second;
      const Event done;
      OK(set(a, 1, 1, first));
      OK(set(b, 1, 1, second));
      OK(set(c, 1, 1, second));
      OK(ncclAllReduce(a, a, 1, ncclFloat32, ncclSum, comm, first));
      OK(cudaEventRecord(done, first));
      OK(ncclAllReduce(c, c, 1, ncclFloat32, ncclSum, comm, second));
      if (ordered) OK(cudaStreamWaitEvent(second, done, 0));
      OK(ncclAllReduce(b, b, 1, ncclFloat32, ncclSum, other, second));
      OK(cudaDeviceSynchronize());
    };
  };
  hw_cpu_config config = config_of(HW_CPU_SEEDED, 2, 0);
  config.check_dependencies = 1;
  config.ordered_launches = 0;
  EXPECT_IN(
      "missing dependency: nothing orders two communications of a rank over different channels, which can deadlock:\n  rank ",
      report_of(HW_CPU_SEEDED, 2, program(false), &config));
  for (int seed = 0; seed < 20; ++seed) {
    config.seed = seed;
    configure(config);
    const ncclUniqueId id = new_id();
    const auto ordered = program(true);
    const std::string error = run_ranks(2, [&](int r) {
      OK(cudaSetDevice(r));
      const Comm comm(id, 2, r);
      ordered(r, comm);
    });
    EXPECT(error.empty());
  }
}

TEST(a_rank_that_never_comes) {
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    hw_cpu_config config = config_of(mode, 2);
    config.timeout_seconds = 0.3;
    configure(config);
    const ncclUniqueId id = new_id();
    ncclComm_t comm;
    EXPECT(ncclCommInitRank(&comm, 2, id, 0) != ncclSuccess);  // Only the timeout ends the wait.
    EXPECT_IN("no progress for", hw_cpu_last_report());
    EXPECT_IN("all 2 ranks of", hw_cpu_last_report());
    configure(config);  // This clears the failure.
  }
}

TEST(a_wait_for_a_rank_that_works_has_no_limit) {
  hw_cpu_config config = config_of(HW_CPU_SEEDED, 2);
  config.timeout_seconds = 2;
  configure(config);
  const ncclUniqueId id = new_id();
  std::string error;
  std::thread waiting([&] {  // The threads of both ranks are unattached.
    try {
      const Comm comm(id, 2, 0);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  });
  OK(cudaSetDevice(1));
  {
    const Stream s;
    const Buffer x(1);
    for (int i = 0; i < 25; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      cudaMemsetAsync(x, 0, 4, s);
      cudaStreamSynchronize(s);
    }
  }
  if (ncclComm_t comm; ncclCommInitRank(&comm, 2, id, 1) == ncclSuccess) ncclCommDestroy(comm);
  waiting.join();
  EXPECT(error.empty());
}

TEST(a_failure_of_one_rank_stops_the_others) {
  for (const int mode : {HW_CPU_PARALLEL, HW_CPU_SEEDED}) {
    const std::string report = report_of(mode, 3, [](int r, ncclComm_t comm) {
      const Buffer x(1);
      const Stream s;
      OK(set(x, 1, 1, s));
      if (r == 1) throw Failure("rank 1 has no more memory");
      OK(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, s));
      OK(cudaStreamSynchronize(s));
    });
    EXPECT_IN("aborted: rank 1 has no more memory", report);
  }
}

TEST(the_end_of_a_communicator_waits_for_its_ops_on_all_streams) {
  configure(config_of(HW_CPU_PARALLEL, 2));
  ncclComm_t comms[2];
  init_all(comms, 2);
  OK(cudaSetDevice(0));
  const Stream late, early;
  const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  OK(hw_cpu_launch("sleep", late, sleep, nullptr, 0, nullptr, 0));
  OK(ncclSignal(1, 0, 0, 0, comms[0], late));
  OK(ncclSignal(1, 1, 0, 0, comms[0], early));
  OK(ncclCommDestroy(comms[0]));
  EXPECT(cudaStreamQuery(late) == cudaSuccess);
  OK(ncclCommDestroy(comms[1]));
}

TEST(bad_arguments) {
  configure(config_of(HW_CPU_PARALLEL, 2));
  ncclComm_t comms[2];
  init_all(comms, 2);
  OK(cudaSetDevice(1));
  const Buffer far(4);
  OK(cudaSetDevice(0));
  const Buffer x(4);
  EXPECT(ncclAllReduce(far, x, 4, ncclFloat32, ncclSum, comms[0], nullptr) == ncclInvalidArgument);
  EXPECT_IN("memory of device 1 in an op of device 0", ncclGetLastError(comms[0]));
  EXPECT(ncclAllGather(x, x, 4, ncclFloat32, comms[0], nullptr) == ncclInvalidArgument);  // The result exceeds the buffer.
  EXPECT(ncclSend(x, 4, ncclFloat32, 2, comms[0], nullptr) == ncclInvalidArgument);
  EXPECT(ncclBroadcast(x, x, 4, ncclFloat32, -1, comms[0], nullptr) == ncclInvalidArgument);
  EXPECT(ncclAllReduce(x, x, 4, ncclNumTypes, ncclSum, comms[0], nullptr) == ncclInvalidUsage);
  EXPECT_IN("not supported by the CPU device", ncclGetErrorString(ncclInvalidUsage));
  EXPECT(ncclGroupEnd() == ncclInvalidUsage);
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  EXPECT(ncclCommDestroy(comms[0]) == ncclInvalidArgument);
}
